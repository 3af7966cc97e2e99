// A model's config.json: a typed error, or a model that round-trips through its JSON.
#include <cstdint>
#include <string>

#include "engine/model/config.h"
#include "tandem/error.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto config = tandem::model_config_from_json(
        std::string(reinterpret_cast<const char*>(data), size), "config.json");
    REQUIRE(tandem::model_config_from_json(tandem::to_json(config), "printed") == config);
  } catch (const tandem::Error&) {
  }
  return 0;
}
