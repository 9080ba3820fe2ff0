"""What a candidate says, done to a model, in the scope of its strategy."""

import tfdist


def spread(build, candidate):
    """Returns the model of `build`, its layers and stages divided as `candidate` says; not compiled anew."""
    model = build()
    if candidate.tensor > 1:
        tfdist.parallelize(model, tfdist.suggest_plan(model, candidate.tensor), print_fn=None)
    if candidate.recompute:
        tfdist.recompute(model, "block")
    if candidate.pipeline > 1:
        model = tfdist.PipelineModel(
            model,
            num_microbatches=candidate.microbatches,
            schedule=candidate.schedule,
            stages_per_rank=candidate.stages_per_rank,
        )
    return model
