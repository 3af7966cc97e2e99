// A synthetic run for tests of the report: two ranks, four layers, serial and overlapped.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "observe/trace.h"

namespace tandem {

inline TimePoint at_us(double us) {
  return TimePoint(std::chrono::nanoseconds(int64_t(us * 1e3)));
}

inline void write_metrics(const std::filesystem::path& file, int steps, double exposed_ms) {
  std::ofstream out(file);
  for (int step = 1; step <= steps; ++step) {
    const double noise = std::sin(step * 12.9898) * 0.08;
    const double loss = 1.1 + 4.4 * std::exp(-step / 60.0) + noise;
    out << "{\"step\":" << step << ",\"loss\":" << loss
        << ",\"tokens_per_s\":" << 11800 + 300 * noise / 0.08
        << ",\"step_ms\":" << 100 + exposed_ms + 2 * noise << ",\"gemm_ms\":" << 64 + noise
        << ",\"compute_ms\":92,\"lr\":0.001,\"grad_norm\":0.5,\"mfu\":0.4";
    if (step % 10 == 0)
      out << ",\"validation_loss\":" << loss + 0.1 << ",\"validation_unit\":\"token\"";
    out << ",\"exposed_comm_ms\":" << exposed_ms << "}\n";
  }
}

/// Metrics of a run with experts, whose load evens out over the steps.
inline void write_expert_metrics(const std::filesystem::path& file, int steps, int layers,
                                 int experts) {
  std::ofstream out(file);
  for (int step = 1; step <= steps; ++step) {
    out << "{\"step\":" << step << ",\"loss\":" << 1.1 + 4.4 * std::exp(-step / 60.0)
        << ",\"tokens_per_s\":11800,\"step_ms\":100,\"gemm_ms\":64,\"compute_ms\":92"
        << ",\"lr\":0.001,\"grad_norm\":0.5,\"exposed_comm_ms\":3,\"aux_loss\":"
        << 0.01 + 0.01 * std::exp(-step / 80.0);
    std::vector<double> imbalances;
    const char* between = ",\"expert_rows\":[[";
    for (int layer = 0; layer < layers; ++layer) {
      double maximum = 0, all = 0;
      for (int e = 0; e < experts; ++e) {
        const double wave = std::sin(e * 2.399 * (layer + 1) + step / 90.0 * (e % 3));
        const double uneven = 0.15 + 1.2 * std::exp(-step / (60.0 * (layer + 1)));
        const double count = std::round(1024 * std::exp2(uneven * wave));
        out << (e ? "," : between) << int(count);
        maximum = std::max(maximum, count);
        all += count;
      }
      between = "],[";
      imbalances.push_back(maximum * experts / all);
    }
    out << "]]";
    for (const char* name : {"imbalance", "expert_imbalance"}) {
      out << ",\"" << name << "\":";
      for (size_t i = 0; i < imbalances.size(); ++i) out << (i ? ',' : '[') << imbalances[i];
      out << ']';
    }
    out << "}\n";
  }
}

// Layers of ag_gemm, attention, gemm_rs, norm, ag_gemm, swiglu, gemm_rs; each GEMM has four tiles,
// the last two of which need two transfers from the peer.
inline std::vector<RankEvents> made_up_trace(bool overlapped, int layers = 4) {
  constexpr double kTile = 90, kWire = 195;
  std::vector<RankEvents> ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    RankEvents& r = ranks[size_t(rank)];
    r.rank = rank;
    double now = 1000 + 7 * rank;
    const auto busy = [&](SpanKind kind, const char* name, double us, int tile = -1) {
      r.events.push_back({kind, name, at_us(now), at_us(now + us), tile, -1});
      now += us;
    };
    const auto wait = [&](const char* name, double until, int tile) {
      if (until <= now) return;
      r.events.push_back({SpanKind::wait, name, at_us(now), at_us(until), tile, 1 - rank});
      now = until;
    };
    const auto product = [&](const char* name) {
      const double start = now;
      for (int chunk = 0; chunk < 2; ++chunk) {
        r.events.push_back({SpanKind::transfer, name, at_us(start + chunk * kWire),
                            at_us(start + (chunk + 1) * kWire), 2 + chunk, 1 - rank});
      }
      const double shift = rank == 0 ? 7 : -7;  // start of the peer's call
      if (!overlapped) wait(name, start + shift + 2 * kWire, 3);
      for (int tile = 0; tile < 4; ++tile) {
        if (tile >= 2) wait(name, start + shift + (tile - 1) * kWire, tile);
        busy(SpanKind::gemm, name, kTile, tile);
      }
    };
    busy(SpanKind::compute, "embedding", 60);
    for (int layer = 0; layer < layers; ++layer) {
      busy(SpanKind::compute, "rmsnorm", 25);
      product("ag_gemm");
      busy(SpanKind::compute, "attention", 260);
      product("gemm_rs");
      busy(SpanKind::compute, "rmsnorm", 25);
      product("ag_gemm");
      busy(SpanKind::compute, "swiglu", 70);
      product("gemm_rs");
    }
  }
  return ranks;
}

inline void write_made_up_run(const std::filesystem::path& dir, const std::string& sample) {
  namespace fs = std::filesystem;
  fs::remove_all(dir);
  for (const bool overlapped : {false, true}) {
    const fs::path folder = dir / "split" / (overlapped ? "overlapped" : "serial");
    fs::create_directories(folder);
    write_metrics(folder / "metrics.jsonl", 20, overlapped ? 3.5 : 41.0);
    write_trace(folder / "trace.json", made_up_trace(overlapped));
  }
  write_metrics(dir / "metrics.jsonl", 600, 6);
  std::ofstream(dir / "sample.txt", std::ios::binary) << sample;
  std::ofstream(dir / "run.json") << R"({
    "title": "Made-up run", "command": "tandem train configs/demo.toml --tp 2 --out out",
    "date": "2001-02-03", "hardware": "2x test CPU", "link": "emulated 1 GB/s 20 us",
    "link_choice": "link chosen so that the 5.0 MB of a step take as long as its 64.0 ms of GEMMs",
    "prompt": "#include <", "tokens": 4300000,
    "heldout": {"files": 41, "bytes": 1000000, "model_bits_per_byte": 1.71,
      "compressors": [{"name": "gzip -9", "bytes": 290000}, {"name": "xz -9", "bytes": 262500}]}})";
}

}  // namespace tandem
