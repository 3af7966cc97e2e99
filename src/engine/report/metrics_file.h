// Reads the files of a run for its report.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/report/ranks/load_map.h"
#include "engine/report/sent_bytes.h"
#include "tandem/error.h"

namespace tandem::report {

/// Text of a file; nothing if it is not there. Throws IoError.
std::optional<std::string> read_if_there(const std::filesystem::path& file);

/// Throws IoError naming `location`.
nlohmann::ordered_json parse_named(std::string_view text, const std::string& location);

/// Converts exceptions of `body` about a JSON value to IoError naming `location`.
template <typename Body>
auto naming(const std::string& location, Body&& body) {
  try {
    return body();
  } catch (const nlohmann::json::exception& error) {
    throw IoError(fmt::format("report: {}: {}", location, error.what()));
  }
}

/// Numbers of a run's steps; missing ones are NaN.
struct Metrics {
  std::vector<double> step, loss, tokens_per_s, step_ms, gemm_ms, compute_ms, exposed_comm_ms;
  std::vector<double> validation_loss, lr, grad_norm, mfu;
  std::vector<double> tokens, elapsed_s;    ///< sums up to the end of the step
  std::vector<double> aux_loss, imbalance;  ///< MoE only; of the layer with the fullest expert
  std::vector<double> last_imbalance;       ///< by layer, of the last step
  std::string validation_unit;              ///< byte or token; "" if no row says
  LoadMap load;
  SentBytes sent;  ///< of the last step
};

/// Throws IoError, also if there is no step.
Metrics read_metrics(const std::filesystem::path& file);

/// `values`, with null for those that are not finite.
nlohmann::ordered_json to_array(const std::vector<double>& values);

}  // namespace tandem::report
