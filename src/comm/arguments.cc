#include "comm/arguments.h"

#include <fmt/format.h>

namespace tandem {

void check_allocation(size_t bytes, int signals) {
  if (signals < 0) {
    throw InvalidArgument(fmt::format("allocate: {} signals: expected at least 0", signals));
  }
  constexpr size_t kMax = size_t(1) << 48;  // leaves room for signals and rounding
  if (bytes > kMax) {
    throw InvalidArgument(fmt::format("allocate: {} bytes: expected at most {}", bytes, kMax));
  }
}

void check_put(int ranks, int peer, const SymmetricBuffer& buffer, size_t offset, size_t bytes,
               int signal) {
  if (peer < 0 || peer >= ranks) {
    throw InvalidArgument(fmt::format("put: peer {}: expected 0 to {}", peer, ranks - 1));
  }
  if (offset > buffer.bytes() || bytes > buffer.bytes() - offset) {
    throw InvalidArgument(fmt::format("put: bytes [{}, {} + {}): the buffer has {} bytes", offset,
                                      offset, bytes, buffer.bytes()));
  }
  check_signal(buffer, signal, "put");
}

void check_signal(const SymmetricBuffer& buffer, int signal, const char* call) {
  if (signal >= 0 && signal < buffer.signals()) return;
  throw InvalidArgument(fmt::format("{}: signal {}: the buffer has {} signals, expected 0 to {}",
                                    call, signal, buffer.signals(), buffer.signals() - 1));
}

}  // namespace tandem
