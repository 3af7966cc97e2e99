// Shared by the benchmarks of single kernels on one GPU: times candidates in random order with idle
// gaps and a flushed L2, and compares them with each other.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/device/device_signal.h"
#include "core/cuda/handles.h"
#include "core/cuda/share.h"
#include "tandem/dtype.h"
#include "tandem/random.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> us;
};

/// `flush` enqueues work that flushes L2, before each run.
template <typename Flush>
void measure(std::vector<Candidate>& candidates, int repeats, const Flush& flush,
             cudaStream_t stream) {
  Event begin(Event::Kind::timing), end(Event::Kind::timing);
  double idle_us = 1000;
  for (int round = -1; round < repeats; ++round) {
    std::vector<size_t> order(candidates.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[philox(3, uint64_t(round + 1), i)[0] % i]);
    }
    for (const size_t which : order) {
      std::this_thread::sleep_for(std::chrono::microseconds(int64_t(idle_us)));
      flush();
      begin.record(stream);
      candidates[which].run();
      end.record(stream);
      check(cudaStreamSynchronize(stream), "a run");
      const double us = microseconds(begin, end);
      idle_us = 2.5 * us;
      if (round >= 0) candidates[which].us.push_back(us);
    }
  }
}

inline double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ptrdiff_t(values.size() / 2));
  return values[values.size() / 2];
}

inline std::vector<float> read(const Tensor& tensor, cudaStream_t stream) {
  std::vector<uint16_t> bits(static_cast<size_t>(tensor.elements()));
  check(
      cudaMemcpyAsync(bits.data(), tensor.data(), 2 * bits.size(), cudaMemcpyDeviceToHost, stream),
      "read");
  check(cudaStreamSynchronize(stream), "read");
  std::vector<float> values;
  for (const uint16_t each : bits) values.push_back(BFloat16{each}.to_float());
  return values;
}

/// Root mean square of the differences, relative to that of the expected values.
inline double difference(const std::vector<float>& found, const std::vector<float>& expected) {
  double off = 0, all = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    off += std::pow(double(found[i]) - double(expected[i]), 2);
    all += std::pow(double(expected[i]), 2);
  }
  return std::sqrt(off / all);
}

using Errors = std::vector<std::pair<std::string, double>>;

/// Prints one JSON object: `what` describes the case, then each candidate's median, min and max in
/// microseconds, and the throughput of the first candidate, whose work is `mega` million
/// operations.
inline void print(const std::string& what, const std::vector<Candidate>& all, const Errors& errors,
                  double mega) {
  std::string fields, off;
  for (const Candidate& each : all) {
    fields += fmt::format("\"{}\":[{:.1f},{:.1f},{:.1f}],", each.name, median(each.us),
                          *std::ranges::min_element(each.us), *std::ranges::max_element(each.us));
  }
  for (const auto& each : errors) {
    off += fmt::format("{}\"{}\":{:.5f}", off.empty() ? "" : ",", each.first, each.second);
  }
  fmt::print("{{{},\"us\":{{{}\"tflops\":{:.0f}}},\"off\":{{{}}}}}\n", what, fields,
             mega / median(all[0].us), off);
  std::fflush(stdout);
}

/// Throws if a GEMM over a wire format exceeds its rounding error.
inline void require_close(const Errors& errors) {
  for (const auto& [name, off] : errors) {
    // The error of a code is up to half a step: 1/127 or 1/7 of the group's max.
    const double maximum = name.starts_with("int8") ? 0.02 : 0.3;
    if (!(off > 0 && off < maximum)) throw std::runtime_error("results are wrong: " + name);
  }
}

/// `main` of a benchmark [RANKS] whose kernels wait: calls `bench(ranks, deadline, stream)`, then
/// reports an error if a wait timed out.
template <typename Bench>
int run_bench(int argc, char** argv, const Bench& bench) {
  try {
    const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
    if (ranks != 2 && ranks != 4 && ranks != 8) {
      throw std::runtime_error(fmt::format("ranks {}: expected 2, 4 or 8", argv[1]));
    }
    auto* const record =
        static_cast<ErrorRecord*>(this_share()->allocate_host(sizeof(ErrorRecord)));
    *record = {};
    const Stream stream;
    bench(ranks, Deadline{record, 5'000'000'000}, stream.get());
    if (record->state != ErrorRecord::kNone) throw std::runtime_error("a wait timed out");
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}

/// Writes 128 MiB to flush L2.
class Flush {
 public:
  explicit Flush(cudaStream_t stream) : memory_(size_t(128) << 20), stream_(stream) {}
  void operator()() const {
    check(cudaMemsetAsync(memory_.data(), 0x5a, memory_.bytes(), stream_), "flush L2");
  }

 private:
  DeviceMemory memory_;
  cudaStream_t stream_;
};

}  // namespace tandem::gpu
