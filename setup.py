"""Drives CMake with ninja; everything declarative is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Builds `specengine._C`; CMAKE_ARGS passes further options, for instance -DSPECENGINE_CUDA=OFF."""

    def build_extension(self, extension: Extension) -> None:
        import pybind11  # a build requirement, absent when setup.py is only asked for metadata

        # A new configuration every time: an old one remembers the ninja of a build environment that is gone.
        build = Path(self.build_temp).resolve()
        shutil.rmtree(build, ignore_errors=True)
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        configure = [
            *["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"],
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel"], check=True)
        # `python -m specengine.bench` in the clone imports the clone's own package: let it find the core there too.
        beside = ROOT / "specengine" / "_C" / target.name
        if beside != target:
            shutil.copy2(target, beside)


setup(ext_modules=[Extension("specengine._C.__init__", sources=[])], cmdclass={"build_ext": CMakeBuild})
