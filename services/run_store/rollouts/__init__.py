"""Kept rollouts of a run: one file of SQLite in its folder, which the trainer writes and many read.

    trainer ──a transaction a step──► rollouts.sqlite3 ◄──read only── samples · live view · logging backends · dashboard

One row a rollout: what it is found by (step, task, group, reward, length, text) in columns of their own, and the
trajectory as the stream had it, with what the trainer added, as msgpack beside it. The oldest steps make room once the
bound is reached, so that ids have no gaps. Text is searched by reading it: an index of words, or of three letters, costs
the trainer two to twenty-five times what keeping the rollout itself does, and 100,000 are read through within a second.
"""
