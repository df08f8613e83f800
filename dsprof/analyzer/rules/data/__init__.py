"""Input: data.stall, data.imbalance, moe.imbalance.

data_stall     the loop waits for it
unequal_input  ranks get unequal amounts of it
sequence       ranks that share a sequence, of which the later have more to do
skipped        the same of two ranks: what the first skips at every exchange, which the second computes
routed_tokens  ranks get unequal numbers of tokens for their experts, which is neither's doing
experts        moe.imbalance: what that costs
pieces         which pieces of the work follow what ranks are given
every_rank     equal shares for ranks that were not captured, too
loader         which DataLoader training waits for, and where its arguments are set
"""
