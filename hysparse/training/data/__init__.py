"""Text in files becomes batches of packed rows; `pipeline.load_data` is what the trainer calls."""
