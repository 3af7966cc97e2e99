// CPU replacement of CUDA's header of this name.
#pragma once

using cudaStream_t = void*;
