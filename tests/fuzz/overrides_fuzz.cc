// Arguments `--set key=value`, one per line.
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "tandem/error.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  std::vector<std::string> overrides;
  for (std::string line; std::getline(lines, line);) overrides.push_back(line);
  try {
    const auto config = tandem::parse_config("[train]\nsteps = 5\n", "fuzz.toml", overrides);
    const std::string printed = config.to_toml();
    REQUIRE(tandem::parse_config(printed, "printed.toml").to_toml() == printed);
  } catch (const tandem::ConfigError& error) {
    REQUIRE(std::string(error.what()).find('\n') == std::string::npos);
  }
  return 0;
}
