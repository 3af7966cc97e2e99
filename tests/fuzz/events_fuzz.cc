// Packed span events of another process: an InvalidArgument, or events that pack to the same bytes.
#include <cstdint>
#include <span>

#include "observe/trace.h"
#include "tandem/error.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto rank = tandem::unpack(std::as_bytes(std::span(data, size)));
    REQUIRE(tandem::unpack(tandem::pack(rank)).events.size() == rank.events.size());
  } catch (const tandem::InvalidArgument&) {
  }
  return 0;
}
