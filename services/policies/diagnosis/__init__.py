"""What is wrong with a machine, a planned run or a running one: findings from facts that others collected. Pure."""
