// Wire::parse: an InvalidArgument, or a format whose text parses to the same format. Then the
// text's bytes as a message of that format: decoders read nothing outside the message and write
// nothing outside the values, whose ends are guarded.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tandem/codec.h"
#include "tandem/error.h"
#include "tests/fuzz/require.h"

namespace {

using namespace tandem;

void decode_hostile(const Wire& wire, DType dtype, int64_t elements, const uint8_t* data,
                    size_t size) {
  // Allocates exactly their sizes on the heap, so that the address sanitizer sees overruns.
  const auto message = std::make_unique<std::byte[]>(size);
  if (size) std::memcpy(message.get(), data, size);
  const size_t bytes = size_t(elements) * size_of(dtype);
  const auto values = std::make_unique<std::byte[]>(bytes + 16);
  std::memset(values.get(), 0x5a, bytes + 16);
  try {
    decode(wire, {message.get(), size}, Tensor(values.get() + 8, dtype, {elements}));
  } catch (const InvalidArgument&) {
    return;
  }
  for (size_t i = 0; i < 8; ++i) {
    REQUIRE(values[i] == std::byte(0x5a) && values[bytes + 8 + i] == std::byte(0x5a));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t end = text.find('\n');
  Wire wire;
  try {
    wire = Wire::parse(text.substr(0, end));
    REQUIRE(Wire::parse(wire.describe()) == wire);
  } catch (const InvalidArgument&) {
    return 0;
  }
  if (end == text.npos) return 0;
  const uint8_t* message = data + end + 1;
  const size_t bytes = size - end - 1;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t elements :
         {int64_t(0), int64_t(1), int64_t(131), int64_t(1025), int64_t(bytes)}) {
      decode_hostile(wire, dtype, elements, message, bytes);
    }
  }
  return 0;
}
