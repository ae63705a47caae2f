"""Convert a model to a folder that loads fast: python3 convert_checkpoint.py SRC DST [--quantize FORMAT]

SRC is a folder, its gs://, s3:// or https:// URL, a GGUF file or a hub id; DST is a new folder, or one in a
bucket: s3:// or gs://BUCKET/PATH. Weights go through memory in slices, and DST can be opened when it is
complete. The same command, run again, goes on where a conversion was killed, and ends with the same bytes.
Several hosts that run the same command and share the disk or the bucket divide the files among them.
With --verify nothing is written: DST's checksums are computed again, and its weights compared with SRC's.
"""
# ruff: noqa: E402  an interrupt is heard before the imports that take long

from terminal.command_line import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()

import argparse
import os
import pathlib

import jax

from checkpoints.checkpoint import open_checkpoint
from checkpoints.file_plan import plan_files
from checkpoints.names import FLOATS
from checkpoints.remote.bucket_folder import NewBucketFolder
from checkpoints.remote.object_storage import is_url
from checkpoints.unfinished import NewFolder, conversion_identity
from checkpoints.verify import verify
from checkpoints.writing import publish, write_weights
from distributed.exchange import agree, from_first, process_index
from feedback.errors import UserError
from quantize import FORMATS, Format
from terminal.command_line import OneLineParser, run
from terminal.launch import add_process_options, join_hosts

FILE_MIB = 1024


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be busy, and is not needed
    jax.config.update("jax_enable_compilation_cache", False)  # the programs are small
    join_hosts(args)
    if args.verify:
        folder, source = (args.destination, args.source) if args.destination else (args.source, None)
        found = from_first(lambda: verify(folder, source))
        if process_index() == 0:
            print("\n".join(found))
    else:
        convert(
            args.source, args.destination, FORMATS[args.quantize], args.dtype, args.file_mib * 2**20,
            args.allow_nonfinite,
        )  # fmt: skip


def convert(
    source: str,
    destination: str,
    format: Format | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_MIB * 2**20,
    allow_nonfinite: bool = False,
) -> None:
    """Write the model at `source` (a folder, a GGUF file or a hub id) to a new folder or a bucket's URL.

    format: of the weights that matmuls contract; None: floats.
    dtype:  "bfloat16" or "float32", of weights that stay floats and declare no type; None: the source's.
    Raises UserError.
    """
    if is_url(destination):
        folder = NewBucketFolder(destination)
    else:
        folder = NewFolder(pathlib.Path(os.path.abspath(os.path.expanduser(destination))))
    checkpoint = open_checkpoint(source)
    if checkpoint.format:
        raise UserError(
            f"{checkpoint.name}: is {checkpoint.format} already; convert the original model instead"
        )
    dtype = dtype or checkpoint.dtype
    identity = conversion_identity(checkpoint, format, dtype, file_bytes)
    agree({f"the conversion of {source}": identity}, "all processes must see the same files")
    if from_first(lambda: folder.is_converted(identity)):
        return
    file_sets = plan_files(checkpoint, format, dtype, file_bytes)
    with folder.claimed(identity):
        write_weights(checkpoint, folder, file_sets, allow_nonfinite)
        from_first(lambda: publish(checkpoint, folder, file_sets, identity))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    sources = "a folder or its gs://, s3:// or https:// URL, a GGUF file, or OWNER/NAME[@REVISION] on the hub"
    add("source", metavar="SRC", help=sources)
    add("destination", metavar="DST", nargs="?", help="the new folder, or s3:// or gs://BUCKET/PATH")
    formats = f"{', '.join(FORMATS)}; g64: a scale for every 64 weights, not 128; default: none"
    add("--quantize", choices=FORMATS, default="none", metavar="FORMAT", help=formats)
    dtypes = "of weights that stay floats; default: bfloat16, or float32 if SRC has that"
    add("--dtype", choices=FLOATS, help=dtypes)
    size = f"the largest size of a file; default: {FILE_MIB}"
    add("--file-mib", type=int, default=FILE_MIB, metavar="N", help=size)
    add("--allow-nonfinite", action="store_true", help="convert weights that are NaN or infinite, too")
    check = "write nothing: check DST and compare it with SRC, or given one folder, check that folder"
    add("--verify", action="store_true", help=check)
    add_process_options(parser)
    args = parser.parse_args(arguments)
    parser.check_positive(args, "file_mib", "timeout")
    if args.destination is None and not args.verify:
        parser.error("the following arguments are required: DST")
    return args


if __name__ == "__main__":
    run(main)
