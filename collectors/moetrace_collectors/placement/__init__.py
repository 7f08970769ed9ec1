"""What another placement of experts would be worth on recorded loads. Nothing here changes one."""
