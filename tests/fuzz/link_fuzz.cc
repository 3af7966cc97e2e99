// EmulatedLink::parse: an InvalidArgument, or a link whose description parses to the same link.
#include <cstdint>
#include <string>

#include "tandem/communicator.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const tandem::EmulatedLink link = tandem::EmulatedLink::parse(text);
    REQUIRE(link.bytes_per_s >= 1 && link.bytes_per_s <= 1e15);
    REQUIRE(link.latency_s >= 0 && link.latency_s <= 3600);
    REQUIRE(link.describe().starts_with("emulated "));
  } catch (const tandem::InvalidArgument&) {
  }
  return 0;
}
