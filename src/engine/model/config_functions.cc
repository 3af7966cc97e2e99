#include "engine/model/config_functions.h"

#include "engine/model/config_value.h"

namespace tandem {

void parse_activation(const nlohmann::ordered_json& root, const char* key, const std::string& file,
                      ModelConfig& config) {
  if (!root.contains(key) || root[key].is_null()) return;
  const auto& name = root[key];
  if (name == "gelu_pytorch_tanh") {
    config.mlp_activation = "gelu_pytorch_tanh";
  } else if (name != "silu" && name != "swish") {
    reject_value(file, key, name, "\"silu\" or \"gelu_pytorch_tanh\"");
  }
}

}  // namespace tandem
