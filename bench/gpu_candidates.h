// What the benchmarks of single kernels on one GPU have in common: candidates that are timed in
// random order with idle gaps, L2 flushed, and compared with each other.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/handles.h"
#include "tandem/dtype.h"
#include "tandem/random.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

constexpr int kRepeats = 21;

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> us;
};

inline void measure(std::vector<Candidate>& candidates, const DeviceMemory& flush,
                    cudaStream_t stream) {
  Event begin(Event::Kind::timing), end(Event::Kind::timing);
  double idle_us = 1000;
  for (int round = -1; round < kRepeats; ++round) {
    std::vector<size_t> order(candidates.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[philox(3, uint64_t(round + 1), i)[0] % i]);
    }
    for (const size_t which : order) {
      std::this_thread::sleep_for(std::chrono::microseconds(int64_t(idle_us)));
      check(cudaMemsetAsync(flush.data(), round & 0xff, flush.bytes(), stream), "flush L2");
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

/// The root mean square of the differences, over that of the expected ones.
inline double difference(const std::vector<float>& found, const std::vector<float>& expected) {
  double off = 0, all = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    off += std::pow(double(found[i]) - double(expected[i]), 2);
    all += std::pow(double(expected[i]), 2);
  }
  return std::sqrt(off / all);
}

using Errors = std::vector<std::pair<std::string, double>>;

/// One JSON object: `what` it is of, each candidate's median, least and most in microseconds, and
/// the rate of the first, whose work is so many `mega` operations.
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

}  // namespace tandem::gpu
