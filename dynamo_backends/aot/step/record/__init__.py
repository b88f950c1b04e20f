"""Records of a step: its torch calls are compared with a trie, and recorded where it has none."""
