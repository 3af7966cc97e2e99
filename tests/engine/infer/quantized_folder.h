// Folders of small models whose matrices are e4m3 codes with scales, and the same weights in f32.
#pragma once

#include <string>

#include "tests/engine/infer/families.h"

namespace tandem::test {

/// Arrangement of scales, and the text of quantization_config that declares it.
struct QuantizedCase {
  std::string name, config;
  int64_t block_rows = 0, block_columns = 0;  ///< 0: all
  bool has_columns = true;                    ///< scales of rows are [rows, 1], else [rows]
  DType scales = DType::f32;
  std::string suffix = "_scale";
};
std::vector<QuantizedCase> quantized_cases();

/// Writes to `folder` the model of `config` with codes in its layers' matrices but those of norms
/// and routers, and to `folder`/values the same weights in f32.
void write_quantized_folder(const std::string& folder, nlohmann::ordered_json config,
                            const QuantizedCase& test);

}  // namespace tandem::test
