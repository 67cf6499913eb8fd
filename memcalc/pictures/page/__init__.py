"""One self-contained page of a plan or a run: HTML, a style and a few lines of script, and nothing from elsewhere."""
