// EmulatedLink::parse: an InvalidArgument, or a link that its own description gives again.
#include <cmath>
#include <cstdint>
#include <string>

#include "tandem/communicator.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const tandem::EmulatedLink link = tandem::EmulatedLink::parse(text);
    REQUIRE(link.bytes_per_s > 0 && std::isfinite(link.bytes_per_s));
    REQUIRE(link.latency_s >= 0 && std::isfinite(link.latency_s));
    REQUIRE(link.describe().starts_with("emulated "));
  } catch (const tandem::InvalidArgument&) {
  }
  return 0;
}
