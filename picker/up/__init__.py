"""Everything on this machine: workers, picker and Envoy as child processes, and a demo."""
