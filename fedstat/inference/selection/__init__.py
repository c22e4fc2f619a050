"""After selection: criteria, debiased and split inference."""
