"""The journal of sessions in Redis: records, appending, replay after a takeover."""
