"""The dashboard: a page that shows a run while it is made, and runs that have ended. Read-only but for what
admin keys allow."""
