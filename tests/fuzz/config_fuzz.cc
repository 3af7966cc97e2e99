// The TOML configuration: a ConfigError, or a configuration that round-trips through its text.
#include <cstdint>
#include <string>

#include "engine/config/config.h"
#include "tandem/error.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  tandem::TrainConfig config;
  try {
    config = tandem::parse_config(text, "fuzz.toml");
  } catch (const tandem::ConfigError& error) {
    REQUIRE(std::string(error.what()).find('\n') == std::string::npos);
    return 0;
  }
  const std::string printed = config.to_toml();
  REQUIRE(tandem::parse_config(printed, "printed.toml").to_toml() == printed);
  try {
    tandem::check_config(config);
  } catch (const tandem::ConfigError&) {
  }
  return 0;
}
