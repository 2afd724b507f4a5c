"""Checkpoints on their way to and from other people: conversion, bundles with their code, model cards."""
