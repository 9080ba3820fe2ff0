"""Level 5: Keras losses of the global batch.

In a step of Keras's trainer (`fit`, `evaluate`, ...) a rank's loss is its *own mean* over what it has, whether Keras or the user
computes it, and counts the rank's part of the batch's rows where gradients are reduced and numbers are logged: see
`trainer_step`. A function of numbers of all rows is one device's: the ranks agree on these (see `placements.repair`); what cannot
be mended is told once.

In a custom training loop a Keras loss whose reduction is a mean is, inside `strategy.run`, the rank's *share* of the global
batch's loss, whatever part of the batch the rank got. The shares add up to the loss that one device would compute, and their
gradients, which `optimizer.apply` sums over the ranks, to its gradient:

    loss = keras.losses.MeanSquaredError()(y, model(x))         # no division by the number of ranks or the batch size
    ...
    strategy.reduce("SUM", losses_of_the_ranks, axis=None)      # the global loss

A share is the own mean times the rank's part of the rows. Outside replicas a loss is the loss.

batch_part ──> sliced_batch ──> trainer_step ──> global_losses ──> over_global_batch
                                     └──> step_gradients
"""

from tfdist.losses.over_global_batch import OverGlobalBatch

__all__ = ["OverGlobalBatch"]
