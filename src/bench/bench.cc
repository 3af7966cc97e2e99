#include "bench/bench.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "bench/bare_transfer.h"
#include "bench/bench_case.h"
#include "bench/bench_moe.h"
#include "bench/bench_receipt.h"
#include "bench/engine/bench_prefill.h"
#include "bench/record_call.h"
#include "tune/measure.h"

namespace tandem {
namespace {

/// Components of an encoded collective, timed separately.
class EncodedAlone {
 public:
  EncodedAlone(Communicator& comm, int64_t bytes, std::unique_ptr<CodecWork> codec)
      : transfer_(comm, bytes), transport_(comm, bytes), codec_(std::move(codec)) {}
  /// In the order of CodecTimes.
  std::vector<std::function<void()>> variants() {
    return {[this] { transfer_.run(); }, [this] { codec_->run(); }, [this] { transport_.run(); }};
  }

 private:
  BareTransfer transfer_;
  TransportWork transport_;
  std::unique_ptr<CodecWork> codec_;
};

double value(const Tensor& t, int64_t i) {
  return t.dtype() == DType::f32 ? double(t.as<float>()[i])
                                 : double(t.as<BFloat16>()[i].to_float());
}

/// Largest difference over largest expected value; infinite for NaN.
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

/// Difference for results that are only moved: 0 only if bitwise equal.
double difference_in_bits(const Tensor& result, const Tensor& expected) {
  if (std::memcmp(result.data(), expected.data(), expected.bytes()) == 0) return 0;
  return std::max(max_relative(result, expected), std::numeric_limits<double>::min());
}

std::vector<Tensor> with(const Tensor& first, const std::vector<Tensor>& more) {
  std::vector<Tensor> all{first};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// One digest per result.
std::vector<uint64_t> digests(const BenchCase& subject) {
  std::vector<uint64_t> all;
  for (const Tensor& result : with(subject.result(), subject.more_results())) {
    all.push_back(XXH3_64bits(result.data(), result.bytes()));
  }
  return all;
}

bool runs_are_bitwise_equal(Communicator& comm, BenchCase& subject, const BoundCandidate& form) {
  subject.reset();
  form.run();
  const std::vector<uint64_t> first = digests(subject);
  double differs = 0;
  for (int run = 0; run < 3; ++run) {
    subject.reset();
    form.run();
    differs += digests(subject) != first;
  }
  return max_over_ranks(comm, differs) == 0;
}

bool ranks_are_bitwise_equal(Communicator& comm, const Tensor& result) {
  const uint64_t local = XXH3_64bits(result.data(), result.bytes());
  for (const auto& blob : comm.exchange(std::as_bytes(std::span(&local, 1)), "bench result")) {
    if (std::memcmp(blob.data(), &local, sizeof local) != 0) return false;
  }
  return true;
}

/// Checks every form against the reference, and its repeated runs against each other.
void check_forms(Communicator& comm, BenchCase& subject, const std::vector<BoundCandidate>& forms,
                 bool exact, BenchResult& result) {
  const auto difference = exact ? difference_in_bits : max_relative;
  for (const BoundCandidate& form : forms) {
    result.bitwise_equal_runs =
        result.bitwise_equal_runs && runs_are_bitwise_equal(comm, subject, form);
    subject.reset();
    subject.reference();
    form.run();
    const std::vector<Tensor> results = with(subject.result(), subject.more_results());
    const std::vector<Tensor> expected = with(subject.expected(), subject.more_expected());
    double error = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      error = std::max(error, difference(results[i], expected[i]));
    }
    result.max_rel = std::max(result.max_rel, max_over_ranks(comm, error));
    if (!subject.is_same_on_all_ranks()) continue;
    result.bitwise_equal_runs =
        ranks_are_bitwise_equal(comm, subject.result()) && result.bitwise_equal_runs;
  }
  if (!subject.has_native()) return;
  result.baseline_max_rel =
      max_over_ranks(comm, difference(subject.native_result(), subject.expected()));
}

}  // namespace

BenchTimes times_of(const std::vector<double>& seconds) {
  const auto [minimum, maximum] = std::minmax_element(seconds.begin(), seconds.end());
  BenchTimes times;
  times.median_us = median(seconds) * 1e6;
  times.min_us = *minimum * 1e6;
  times.max_us = *maximum * 1e6;
  for (const double each : seconds) times.rounds_us.push_back(each * 1e6);
  return times;
}

void BenchResult::add(const std::string& name, Strategy form, const BenchTimes& times,
                      bool encoded) {
  candidates[name] = {form, times, encoded};
  if (encoded && form == Strategy::serial) return;
  std::string& fastest = form == Strategy::serial ? serial_name : overlapped_name;
  BenchTimes& best = form == Strategy::serial ? serial : overlapped;
  if (!fastest.empty() && best.median_us <= times.median_us) return;
  fastest = name;
  best = times;
}

void BenchResult::choose_among(std::span<const BoundCandidate> forms) {
  const auto us = [&](const BoundCandidate& form) {
    return candidates.at(form.name).times.median_us;
  };
  const BoundCandidate& fastest = *std::ranges::min_element(forms, {}, us);
  overlapped_name = fastest.name;
  overlapped = candidates.at(fastest.name).times;
}

double BenchResult::limit_us() const {
  if (codec_times) return codec_times->limit_us();
  return std::max(gemm.median_us, wire.median_us);
}

void BenchResult::set_efficiency(EctOf how) {
  const RoundTimes rounds{gemm.rounds_us, serial.rounds_us, overlapped.rounds_us};
  ect = exposed(rounds, how);
  efficiency_range = tandem::efficiency_range(rounds, how);
  ect_of_ = how;
}

double BenchResult::efficiency_of(const BenchTimes& times) const {
  return exposed({gemm.rounds_us, serial.rounds_us, times.rounds_us}, ect_of_).efficiency();
}

std::optional<NamedTimes> BenchResult::fastest_uncompressed() const {
  return fastest([](const CandidateTimes& each) {
    return !each.encoded && each.form == Strategy::overlapped;
  });
}
std::optional<NamedTimes> BenchResult::fastest_encoded() const {
  return fastest([](const CandidateTimes& each) { return each.encoded; });
}

std::optional<NamedTimes> BenchResult::fastest(
    const std::function<bool(const CandidateTimes&)>& counts) const {
  std::optional<NamedTimes> best;
  for (const auto& [name, candidate] : candidates) {
    if (!counts(candidate)) continue;
    if (!best || candidate.times.median_us < best->times.median_us) best = {name, candidate.times};
  }
  return best;
}

BenchResult run_bench(Communicator& comm, const BenchRequest& request) {
  if (comm.on_gpu()) return run_gpu_bench(comm, request);
  check_bench(request, comm.size());
  auto subject = make_moe_case(comm, request);
  if (!subject) subject = make_prefill_case(comm, request);
  if (!subject) subject = make_operator_case(comm, request);
  if (!subject) subject = make_collective_case(comm, request);
  const std::vector<BoundCandidate> forms = subject->forms();
  BenchResult result;
  result.bytes = subject->wire_bytes();
  BareTransfer transfer(comm, result.bytes);
  std::vector<TimedRun> variants{timed(comm, [&] { transfer.run(); })};
  if (subject->has_native()) {
    variants.emplace_back([&] { return subject->native(); });
  } else if (!subject->reference_is_a_form()) {
    variants.push_back(timed(comm, [&] { subject->reference(); }));
  }
  const size_t first_form = variants.size();
  for (const BoundCandidate& form : forms) variants.push_back(timed(comm, form.run));
  const size_t behind_forms = variants.size();
  if (subject->has_gemm()) variants.push_back(timed(comm, [&] { subject->gemm_alone(); }));
  std::optional<EncodedAlone> alone;
  if (auto codec = subject->codec_work()) {
    std::ranges::find(forms, true, &BoundCandidate::encoded)->run();
    alone.emplace(comm, int64_t(max_over_ranks(comm, double(subject->counted_bytes()))),
                  std::move(codec));
    for (const auto& variant : alone->variants()) variants.push_back(timed(comm, variant));
  }
  const auto samples = measure(comm, variants, {7, request.repeats, request.repeats, 0});
  result.saved_bytes = int64_t(max_over_ranks(comm, double(subject->saved_bytes())));
  result.baseline = subject->baseline();
  result.wire = times_of(samples[0]);
  const bool operation = subject->has_gemm();
  const char* plainest = operation ? kUnfused : subject->has_native() ? "mpi" : "direct_puts";
  if (first_form > 1) result.add(plainest, Strategy::serial, times_of(samples[1]));
  for (size_t i = 0; i < forms.size(); ++i) {
    result.add(forms[i].name, forms[i].form, times_of(samples[first_form + i]), forms[i].encoded);
  }
  if (!operation && result.serial_name == "uncompressed")
    result.baseline = "this library without the codec";
  if (subject->reports_choice()) result.choose_among(forms);
  const auto fastest = std::ranges::find(forms, result.overlapped_name, &BoundCandidate::name);
  result.chunks = fastest->chunks;
  if (operation) {
    result.gemm = times_of(samples[behind_forms]);
    result.set_efficiency(EctOf::differences);
    result.receipts = subject->receipts();
    if (result.receipts.empty()) {
      result.receipts = {choose_receipt(request, result, comm.size())};
    }
  }
  if (alone) {
    result.codec_times = {times_of(samples[behind_forms]), times_of(samples[behind_forms + 1]),
                          times_of(samples[behind_forms + 2])};
  }
  const bool moves = only_moves(request.op), exact = moves && request.wire.is_exact();
  check_forms(comm, *subject, forms, exact, result);
  if (request.timeline) result.timeline = record_call(comm, fastest->run);
  if (!request.wire.is_none()) {
    if (!operation) fastest->run();  // counted_bytes() then refers to this call
    result.wire_bytes = subject->counted_bytes();
  }
  // f32: at most a different summation order; bf16: one more rounding per contribution.
  const double rounding = request.dtype == DType::f32 ? 1e-5 : 0x1p-6;
  result.baseline_bound = moves ? 0 : rounding;
  result.bound = exact ? 0 : rounding;
  if (!request.wire.is_none()) result.bound += max_over_ranks(comm, subject->codec_error());
  return result;
}

}  // namespace tandem
