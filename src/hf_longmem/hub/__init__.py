"""Checkpoints on their way to and from other people: conversion."""
