"""Level 5: Keras losses of the global batch.

Under a tfdist strategy a Keras loss whose reduction is a mean is, inside `strategy.run`, the rank's *share* of the global
batch's loss, whatever part of the batch the rank got. The shares add up to the loss that one device would compute, and their
gradients, which `optimizer.apply` sums over the ranks, to its gradient. In a training loop of one's own, therefore:

    loss = keras.losses.MeanSquaredError()(y, model(x))         # no division by the number of ranks or the batch size
    ...
    strategy.reduce("SUM", losses_of_the_ranks, axis=None)      # the global loss

batch_part ──> rank_batch, sliced_batch ──> global_losses <── shares
"""
