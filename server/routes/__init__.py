"""One module for each group of paths; each makes a router from the Service. Knows nothing of uvicorn or the command line."""
