#include "codec/enqueue.h"

#include "codec/cuda/encode.h"

namespace tandem {

void encode_on_gpu(const Exec& exec, const Wire& wire, const Tensor& values, std::byte* message) {
  gpu::check_message("encode", wire, values, message);
  gpu::launch_encode(wire, values, message, exec.stream);
}

void decode_on_gpu(const Exec& exec, const Wire& wire, const std::byte* message,
                   const Tensor& values) {
  gpu::check_message("decode", wire, values, message);
  gpu::launch_decode(wire, message, values, exec.stream);
}

}  // namespace tandem
