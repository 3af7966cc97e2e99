#include "overlap/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/log.h"
#include "overlap/bench_subject.h"
#include "overlap/measure.h"
#include "overlap/plan.h"
#include "overlap/record_call.h"
#include "overlap/workspace.h"
#include "schedule/ring.h"

namespace tandem {
namespace {

/// The bytes alone: each rank sends its share to every peer and waits for theirs.
class Wire {
 public:
  Wire(Communicator& comm, int64_t bytes)
      : each_(comm.size() > 1 ? size_t(bytes / (comm.size() - 1)) : 0),
        slot_(agreed(comm, each_)),
        source_(each_),
        workspace_(comm, "wire", slot_ * size_t(comm.size()), 0, comm.size()) {}
  void run() {
    const int rank = workspace_.comm().rank(), world = workspace_.comm().size();
    workspace_.begin();
    for (int step = 0; step + 1 < world; ++step) {
      workspace_.put(schedule::rs_owner(rank, world, step), size_t(rank) * slot_, source_.data(),
                     each_, rank);
    }
    for (int step = 0; step + 1 < world; ++step) {
      const int source = schedule::rs_source(rank, world, step);
      workspace_.await(source, source, 0);
    }
    workspace_.flush();
  }

 private:
  /// Uneven shards differ by a row: the largest counts.
  static size_t agreed(Communicator& comm, size_t bytes) {
    size_t most = bytes;
    for (const auto& blob : comm.exchange(std::as_bytes(std::span(&bytes, 1)), "wire bytes")) {
      size_t other;
      std::memcpy(&other, blob.data(), sizeof other);
      most = std::max(most, other);
    }
    return most + 64;
  }
  size_t each_, slot_;  // bytes to a peer; room for any rank's
  Buffer source_;
  OverlapWorkspace workspace_;
};

BenchTimes times_of(const std::vector<double>& seconds) {
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  BenchTimes times;
  times.median_us = median(seconds) * 1e6;
  times.least_us = *least * 1e6;
  times.most_us = *most * 1e6;
  for (const double each : seconds) times.rounds_us.push_back(each * 1e6);
  return times;
}

double value(const Tensor& t, int64_t i) {
  return t.dtype() == DType::f32 ? double(t.as<float>()[i])
                                 : double(t.as<BFloat16>()[i].to_float());
}

/// Largest difference over largest expected value; infinite for what is not a number.
double max_relative(const Tensor& result, const Tensor& expected) {
  double difference = 0, scale = 0;
  for (int64_t i = 0; i < expected.elements(); ++i) {
    const double d = std::abs(value(result, i) - value(expected, i));
    if (std::isnan(d)) return INFINITY;
    difference = std::max(difference, d);
    scale = std::max(scale, std::abs(value(expected, i)));
  }
  return scale > 0 ? difference / scale : difference;
}

double max_over_ranks(Communicator& comm, double own) {
  double most = own;
  for (const auto& blob : comm.exchange(std::as_bytes(std::span(&own, 1)), "bench")) {
    double other;
    std::memcpy(&other, blob.data(), sizeof other);
    most = std::max(most, other);
  }
  return most;
}

bool runs_are_bitwise_equal(Communicator& comm, BenchSubject& subject) {
  subject.reset();
  subject.overlapped();
  const auto* bytes = static_cast<const std::byte*>(subject.result().data());
  const std::vector<std::byte> first(bytes, bytes + subject.result().bytes());
  double differs = 0;
  for (int run = 0; run < 3; ++run) {
    subject.reset();
    subject.overlapped();
    differs += std::memcmp(first.data(), bytes, first.size()) != 0;
  }
  return max_over_ranks(comm, differs) == 0;
}

/// The fastest of some chunk counts, timed in turns; left set. Two calls warm both halves of each
/// one's workspace.
int choose_chunks(Communicator& comm, BenchSubject& subject, const BenchRequest& request) {
  const std::vector<int> counts = chunk_counts(request.m / comm.size());
  std::vector<std::function<void()>> variants;
  for (const int chunks : counts) {
    variants.emplace_back([&subject, chunks] {
      subject.set_chunks(chunks);
      subject.overlapped();
    });
    variants.back()();
  }
  const auto samples = measure(comm, variants, {1, 9, 15, 5});
  size_t best = 0;
  std::vector<double> seconds;
  for (const auto& sample : samples) {
    seconds.push_back(median(sample));
    log_message(LogLevel::debug, fmt::format("bench: {} chunks: {:.0f} us",
                                             counts[seconds.size() - 1], seconds.back() * 1e6));
    if (seconds.back() < seconds[best]) best = seconds.size() - 1;
  }
  subject.set_chunks(counts[best]);
  subject.drop_other_chunks();
  return counts[best];
}

}  // namespace

std::string_view name_of(Form form) {
  return form == Form::serial ? "serial" : "overlapped";
}

void BenchResult::add(const std::string& name, Form form, const BenchTimes& times) {
  candidates[name] = {form, times};
  std::string& fastest = form == Form::serial ? serial_name : overlapped_name;
  BenchTimes& best = form == Form::serial ? serial : overlapped;
  if (!fastest.empty() && best.median_us <= times.median_us) return;
  fastest = name;
  best = times;
}

double BenchResult::limit_us() const {
  return std::max(gemm.median_us, wire.median_us);
}

void BenchResult::set_efficiency(EctOf how) {
  const RoundTimes rounds{gemm.rounds_us, serial.rounds_us, overlapped.rounds_us};
  ect = exposed(rounds, how);
  efficiency_range = tandem::efficiency_range(rounds, how);
}

BenchResult run_bench(Communicator& comm, const BenchRequest& request) {
  if (comm.on_gpu()) return run_gpu_bench(comm, request);
  check_bench(request, comm.size());
  auto subject = make_operator_subject(comm, request);
  if (!subject) subject = make_collective_subject(comm, request);
  BenchResult result;
  result.bytes = subject->wire_bytes();
  Wire wire(comm, result.bytes);
  result.chunks = request.chunks;
  if (request.chunks || !subject->has_gemm()) {
    subject->set_chunks(request.chunks);
  } else {
    result.chunks = choose_chunks(comm, *subject, request);
  }
  std::vector<TimedVariant> variants{
      timed(comm, [&] { wire.run(); }), timed(comm, [&] { subject->overlapped(); }),
      subject->has_native() ? TimedVariant([&] { return subject->native(); })
                            : timed(comm, [&] { subject->reference(); })};
  if (subject->has_serial()) variants.push_back(timed(comm, [&] { subject->serial(); }));
  if (subject->has_gemm()) variants.push_back(timed(comm, [&] { subject->gemm_alone(); }));
  const auto samples = measure(comm, variants, {7, request.repeats, request.repeats, 0});
  result.baseline = subject->baseline();
  result.wire = times_of(samples[0]);
  const bool operation = subject->has_gemm();
  result.add(operation ? "overlapped" : "tandem", Form::overlapped, times_of(samples[1]));
  const char* plainest = operation ? "unfused" : subject->has_native() ? "mpi" : "direct_puts";
  result.add(plainest, Form::serial, times_of(samples[2]));
  if (subject->has_serial()) result.add("serial", Form::serial, times_of(samples[3]));
  if (subject->has_gemm()) {
    result.gemm = times_of(samples.back());
    result.set_efficiency(EctOf::differences);
  }
  result.bitwise_equal_runs = runs_are_bitwise_equal(comm, *subject);
  subject->reset();
  subject->reference();
  subject->overlapped();
  result.max_rel = max_over_ranks(comm, max_relative(subject->result(), subject->expected()));
  if (subject->has_native()) {
    result.baseline_max_rel =
        max_over_ranks(comm, max_relative(subject->native_result(), subject->expected()));
  }
  if (request.timeline) {
    result.timeline = record_call(comm, [&] { subject->overlapped(); });
  }
  // f32: another order of additions at most; bf16: one rounding of each contribution more.
  result.bound = request.dtype == DType::f32 ? 1e-5 : 0x1p-6;
  return result;
}

}  // namespace tandem
