#include "bench/gpu/report.h"

#include <cublasLt.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>

#include "core/version.h"

namespace tandem::gpu {
namespace {

using Entry = std::pair<std::string, Timing>;

Entry fastest(const std::map<std::string, Timing>& ways) {
  return *std::min_element(ways.begin(), ways.end(), [](const auto& a, const auto& b) {
    return a.second.median_us < b.second.median_us;
  });
}

double round_us(double us) {
  return std::round(us * 100) / 100;
}

double efficiency(const Result& result) {
  const double serial = fastest(result.serial).second.median_us - result.gemm.median_us;
  const double ours = fastest(result.overlapped).second.median_us - result.gemm.median_us;
  return 1 - ours / serial;
}

nlohmann::json all_ways(const Result& result) {
  nlohmann::json ways;
  for (const auto* group : {&result.serial, &result.overlapped}) {
    for (const auto& [name, timing] : *group) {
      ways[name] = {{"median", round_us(timing.median_us)},
                    {"min", round_us(timing.min_us)},
                    {"max", round_us(timing.max_us)},
                    {"host", round_us(timing.host_us)}};
    }
  }
  return ways;
}

nlohmann::json versions() {
  int runtime = 0, driver = 0, nccl = 0;
  check(cudaRuntimeGetVersion(&runtime), "CUDA version");
  check(cudaDriverGetVersion(&driver), "driver version");
  check(ncclGetVersion(&nccl), "NCCL version");
  return {{"tandem", kVersion},
          {"cuda", runtime},
          {"driver", driver},
          {"nccl", nccl},
          {"cublaslt", cublasLtGetVersion()}};
}

std::string hardware(int ranks) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "device properties");
  return fmt::format("{}x {}", ranks, properties.name);
}

}  // namespace

nlohmann::json to_json(const Result& result, const std::string& command) {
  const auto [serial_name, serial] = fastest(result.serial);
  const auto [ours_name, ours] = fastest(result.overlapped);
  const double gemm = result.gemm.median_us;
  nlohmann::json json = {
      {"op", result.op},
      {"transport", "nccl"},
      {"link", result.link},
      {"ranks", result.ranks},
      {"m", result.m},
      {"n", result.n},
      {"k", result.k},
      {"dtype", result.dtype},
      {"bytes", result.bytes},
      {"strategy", ours.median_us <= serial.median_us ? "overlapped" : "serial"},
      {"codec", nullptr},
      {"config",
       {{"serial", serial_name},
        {"overlapped", ours_name},
        {"detail", result.detail},
        {"cuda_graph", result.graph},
        {"ways_us", all_ways(result)}}},
      {"time_us",
       {{"gemm", round_us(gemm)},
        {"serial", round_us(serial.median_us)},
        {"overlapped", round_us(ours.median_us)},
        {"wire", round_us(result.wire.median_us)},
        {"limit", round_us(std::max(gemm, result.wire.median_us))}}},
      {"spread_us",
       {{"serial", {round_us(serial.min_us), round_us(serial.max_us)}},
        {"overlapped", {round_us(ours.min_us), round_us(ours.max_us)}}}},
      {"host_us", round_us(ours.host_us)},
      {"ect_us",
       {{"serial", round_us(serial.median_us - gemm)},
        {"overlapped", round_us(ours.median_us - gemm)}}},
      {"error", {{"max_rel", result.max_rel}, {"bound", 1.0}, {"max_of_bound", result.of_bound}}},
      {"bitwise_equal_runs", result.bitwise_equal_runs},
      {"hardware", hardware(result.ranks)},
      {"versions", versions()},
      {"commit", kCommit},
      {"command", command},
      {"date", fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr)))}};
  if (result.gemm.median_us > 0) json["efficiency"] = std::round(efficiency(result) * 1e4) / 1e4;
  return json;
}

std::string describe(const Result& result) {
  const auto [serial_name, serial] = fastest(result.serial);
  const auto [ours_name, ours] = fastest(result.overlapped);
  std::string text = fmt::format(
      "{:10} M {:6} N {:6} K {:6}: gemm {:8.1f} wire {:7.1f} serial {:8.1f} ({}) overlapped "
      "{:8.1f} "
      "({}) {:.2f}x",
      result.op, result.m, result.n, result.k, result.gemm.median_us, result.wire.median_us,
      serial.median_us, serial_name, ours.median_us, ours_name, serial.median_us / ours.median_us);
  if (result.gemm.median_us > 0) text += fmt::format(" E {:.2f}", efficiency(result));
  if (!result.detail.empty()) text += " [" + result.detail + "]";
  for (const auto* group : {&result.serial, &result.overlapped}) {
    for (const auto& [name, timing] : *group) {
      text += fmt::format(" | {} {:.1f} host {:.0f}", name, timing.median_us, timing.host_us);
    }
  }
  return text + fmt::format(" | error {:.2f} of bound, {}", result.of_bound,
                            result.correct() ? "correct" : "WRONG");
}

}  // namespace tandem::gpu
