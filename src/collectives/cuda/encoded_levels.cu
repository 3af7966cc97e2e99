#include "collectives/cuda/encoded_kernels.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {

EncodedKernel level_kernel(const Wire& wire, bool one_shot) {
  switch (wire.codec) {
    case Codec::int8:
      return encoded_kernel<codec::Levels<8>>(one_shot);
    case Codec::int6:
      return encoded_kernel<codec::Levels<6>>(one_shot);
    case Codec::int5:
      return encoded_kernel<codec::Levels<5>>(one_shot);
    case Codec::int4:
      return encoded_kernel<codec::Levels<4>>(one_shot);
    case Codec::int3:
      return encoded_kernel<codec::Levels<3>>(one_shot);
    case Codec::int2:
      return encoded_kernel<codec::Levels<2>>(one_shot);
    case Codec::none:
    case Codec::e4m3:
    case Codec::e5m2:
    case Codec::mxfp8:
    case Codec::mxfp6:
    case Codec::mxfp4:
    case Codec::lossless:
      break;
  }
  return nullptr;
}

}  // namespace tandem::gpu
