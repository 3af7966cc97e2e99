#include "codec/enqueue.h"

namespace tandem {

size_t enqueue_encode(const Exec& exec, const Wire& wire, const Tensor& values,
                      std::byte* message) {
  const size_t bytes = wire.bytes(values.elements(), values.dtype());
  if (!exec.on_gpu()) return encode(wire, values, {message, bytes});
  encode_on_gpu(exec, wire, values, message);
  return bytes;
}

void enqueue_decode(const Exec& exec, const Wire& wire, std::span<const std::byte> message,
                    const Tensor& values) {
  if (!exec.on_gpu()) return decode(wire, message, values);
  decode_on_gpu(exec, wire, message.data(), values);
}

}  // namespace tandem
