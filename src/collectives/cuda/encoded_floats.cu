#include "collectives/cuda/encoded_kernels.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {

EncodedKernel float_kernel(const Wire& wire, bool one_shot) {
  switch (wire.codec) {
    case Codec::e5m2:
      return encoded_kernel<codec::E5M2>(one_shot);
    case Codec::mxfp6:
      return encoded_kernel<codec::E2M3>(one_shot);
    case Codec::mxfp4:
      return encoded_kernel<codec::E2M1>(one_shot);
    case Codec::e4m3:
    case Codec::mxfp8:
      return encoded_kernel<codec::E4M3>(one_shot);
    case Codec::none:
    case Codec::int8:
    case Codec::int6:
    case Codec::int5:
    case Codec::int4:
    case Codec::int3:
    case Codec::int2:
    case Codec::lossless:
      break;
  }
  return nullptr;
}

}  // namespace tandem::gpu
