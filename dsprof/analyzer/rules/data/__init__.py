"""Input: data.stall, data.imbalance.

data_stall     the loop waits for it
unequal_input  ranks get unequal amounts of it
routed_tokens  ranks get unequal numbers of tokens for their experts, which is neither's doing
loader         which DataLoader training waits for, and where its arguments are set
"""
