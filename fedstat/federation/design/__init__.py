"""What a model and its sites agree on before anything is estimated: coding, transforms, columns, rows."""
