"""The one legend of axes, used in docstrings, comments and local tensor names such as ``qk_BHTD``.

======  =======================================================================
letter  axis
======  =======================================================================
B       batch, the rows of an input
T       tokens of a row, in document order
H       attention heads
D       width of one head
E       hidden width of the model
R       hash rounds
K       buckets of one hash round
F       columns of one round's rotation matrix: half the sum of its bucket factors
C       chunk length
W       window: how many tokens a query may look back (or ahead)
N       basis functions of the long-term memory
L       segment length
M       samples of the past taken when memory is contracted
V       vocabulary
======  =======================================================================

Files under ``models/`` keep the names that transformers uses (``hidden_states``, ``attention_mask``).
"""
