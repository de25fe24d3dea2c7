"""Compile the kernels, where there is a compiler. Whatever else is to be said of a build stands in pyproject.toml.

kernels.so is a plain shared library, which ctypes opens: nothing of Python is in it, so one wheel serves every version.
Without it torch's own products serve, so a build that cannot compile it goes on and leaves it out. One that is to fail
instead is told so: NEUROGRID_BUILD_KERNELS=required.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

REQUIRED = os.environ.get("NEUROGRID_BUILD_KERNELS") == "required"
PLATFORMS = ("linux-x86_64", "linux-aarch64")
# The whole of them: with those of Python or of the environment, a sum could be made in another order, and the path to
# this machine's Python would be in the library.
FLAGS = ("-std=gnu11", "-O3", "-fopenmp", "-Wno-psabi", "-fPIC", "-shared")


class BuildKernels(build_ext):
    """Compile and link in one step, into a file whose name has no version of Python in it.

    What was there before goes first: where compiling fails, it would pass for what this source makes.
    """

    def run(self) -> None:
        if self.inplace:
            for ext in self.extensions:
                Path(self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.unlink(missing_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        # gcc and not cc: the source has pragmas that others do not know.
        compiler = shlex.split(os.environ.get("CC") or "gcc")
        self.spawn([*compiler, *FLAGS, *ext.sources, "-o", str(output)])

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class Wheel(bdist_wheel):
    """Named for the platform that its kernels are for, or for any if it has none."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Until something is compiled into it. In an editable one nothing is: kernels.so lies beside its source.
        self.root_is_pure = True

    def run(self) -> None:
        self.run_command("build")
        if any(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs())):
            self.root_is_pure = False
        else:
            self.distribution.ext_modules = []
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernels = Extension(
    "neurogrid.model.kernels.kernels",
    ["neurogrid/model/kernels/kernels.c"],
    depends=[f"neurogrid/model/kernels/{name}" for name in ("attention.c", "layer.c", "layer.h")],
    optional=not REQUIRED,
)
is_for_us = sysconfig.get_platform() in PLATFORMS
if REQUIRED and not is_for_us:
    sys.exit(f"There are no kernels for {sysconfig.get_platform()}: {', '.join(PLATFORMS)}.")
setup(
    ext_modules=[kernels] if is_for_us else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
