"""Stands in for a module that transformers' source distribution refers to and does not contain."""

# Arguments that every configuration takes, none at its default.
config_common_kwargs = {
    "architectures": ["SomeModel"],
    "chunk_size_feed_forward": 3,
    "dtype": "float16",
    "id2label": {0: "no", 1: "yes", 2: "perhaps"},
    "label2id": {"no": 0, "yes": 1, "perhaps": 2},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "multi_label_classification",
    "return_dict": False,
}
