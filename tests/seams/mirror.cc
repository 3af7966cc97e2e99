#include "tests/seams/mirror.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem::test {
namespace {

void turn_over(const std::byte* from, size_t bytes, std::byte* to) {
  for (size_t i = 0; i < bytes; ++i) to[i] = ~from[i];
}

size_t bytes_of(int64_t elements, DType dtype) {
  return size_t(elements) * size_of(dtype);
}

}  // namespace

codec::WholeCodec mirror() {
  return {.name = "mirror",
          .require = [](DType) {},
          .max_bytes = bytes_of,
          .bits_per_element = [](DType dtype) { return 8 * double(size_of(dtype)); },
          .encode =
              [](DType dtype, const void* values, int64_t elements, std::byte* message) {
                const size_t bytes = bytes_of(elements, dtype);
                turn_over(static_cast<const std::byte*>(values), bytes, message);
                return bytes;
              },
          .decode =
              [](DType dtype, std::span<const std::byte> message, int64_t elements, void* values) {
                const size_t bytes = bytes_of(elements, dtype);
                if (message.size() < bytes) {
                  throw InvalidArgument(
                      fmt::format("mirror: {} bytes: expected {}", message.size(), bytes));
                }
                turn_over(message.data(), bytes, static_cast<std::byte*>(values));
              }};
}

}  // namespace tandem::test
