"""From corpora to global batches: tokenizers, preprocessing, indexed datasets, the sample order, loading."""
