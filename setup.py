"""Drives CMake with ninja; everything declarative is in pyproject.toml."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))  # an isolated build does not look for modules here

from build_cache import build_or_fetch, cache_folder, core_key, place, user_folder, versions  # noqa: E402
from build_log import BuildLog  # noqa: E402
from cuda_choice import choose_for  # noqa: E402


class CMakeBuild(build_ext):
    """Builds `specengine._C`; SPECENGINE_CUDA chooses the GPUs (cuda_choice.py), CMAKE_ARGS passes further options.

    A second build of the same sources with the same options and compilers takes the core from the user's cache folder.
    """

    def build_extension(self, extension: Extension) -> None:
        import pybind11  # a build requirement, absent when setup.py is only asked for metadata

        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        cuda = choose_for(os.environ)
        facts = [*versions(), f"pybind11 {pybind11.__version__}", f"CUDA {cuda}"]
        folder = cache_folder()

        def compile_core() -> None:
            self.compile(target, pybind11.get_cmake_dir())

        if build_or_fetch(folder, lambda: core_key(ROOT, facts), target, compile_core):
            print(f"specengine: {cuda.reason}")
            print(f"specengine: the core comes from {folder}; SPECENGINE_BUILD_CACHE=0 compiles it again")
        # `python -m specengine.bench` in the clone imports the clone's own package: let it find the core there too.
        beside = ROOT / "specengine" / "_C" / target.name
        if beside != target:
            place(target, beside)

    def compile(self, target: Path, pybind11_folder: str) -> None:
        # A new configuration every time: an old one remembers the ninja of a build environment that is gone.
        build = Path(self.build_temp).resolve()
        shutil.rmtree(build, ignore_errors=True)
        configure = [
            *["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"],
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_folder}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        folder = user_folder()
        with BuildLog(folder and folder / "build.log") as log:
            log.run(configure, os.environ)
            log.run(["cmake", "--build", str(build)], os.environ)


setup(ext_modules=[Extension("specengine._C.__init__", sources=[])], cmdclass={"build_ext": CMakeBuild})
