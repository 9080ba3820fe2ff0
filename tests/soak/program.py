"""The program that is disturbed, `python -m tests.soak.program`: trains the job of the spec, and leaves marks on its way."""

from tests.soak import marks


def main() -> None:
    marks.mark("start")
    from tests.soak import inside

    faults = inside.Faults()
    faults.at("start")
    from tests.soak import training_program  # imports TensorFlow

    marks.mark("imported")
    training_program.main(faults)
    marks.mark("end")
    faults.at("end")


if __name__ == "__main__":
    main()
