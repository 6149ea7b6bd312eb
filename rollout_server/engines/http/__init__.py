"""An engine that is a foreign vLLM server, over HTTP."""
