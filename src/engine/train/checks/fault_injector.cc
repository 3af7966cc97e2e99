#include "engine/train/checks/fault_injector.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "comm/exec.h"
#include "comm/link_fault.h"
#include "comm/message_fault.h"
#include "core/system/file_descriptor.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/lines.h"
#include "core/system/printable.h"
#include "core/system/write_fault.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/device_traits.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "engine/parallel/sync/fragments.h"
#include "engine/train/model_pieces.h"
#include "observe/recorder.h"
#include "observe/slowdown.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

// Messages of at least this size have gradients or weights: smaller ones may be of an exchange,
// whose flipped length would end the run by a time-out.
constexpr uint64_t kDataBytes = 4096;

bool is_flip_of_state(FaultKind kind) {
  return kind == FaultKind::flip_weights || kind == FaultKind::flip_masters ||
         kind == FaultKind::flip_moments;
}

/// Whether a run that is resumed must not meet the fault again: it would not pass that step.
bool may_end_run(FaultKind kind) {
  return kind == FaultKind::kill || kind == FaultKind::hang || kind == FaultKind::no_space ||
         kind == FaultKind::io_error || kind == FaultKind::flip_gradients || is_flip_of_state(kind);
}

}  // namespace

/// Contiguous elements of one tensor that a bit may be flipped in.
struct FaultInjector::Spot {
  const Parameter& parameter;
  Tensor values;
};

FaultInjector::FaultInjector(const FaultPlan& plan, const ParallelGroups& groups, ModelRanks& ranks,
                             const SyncConfig& sync, const std::string& out)
    : plan_(plan), groups_(groups), ranks_(ranks), sync_(sync), out_(out) {
  refuse_on_gpu(make_exec(groups.world()), "--inject", "CPU ranks");
  if (plan.has(FaultKind::slow_link) && !groups.world().link().starts_with("emulated")) {
    throw Unsupported("--inject: slow_link: expected ranks of one process and parallel.link");
  }
  const std::string path = out + "/injected.jsonl";
  if (!path_exists(path)) return;
  for (const std::string_view line : Lines(read_file(path))) {
    const auto json = parse_json<>(line);
    const auto is_number = [&](const char* key) {
      return json.contains(key) && json[key].is_number_integer();
    };
    if (!json.is_object() || !is_number("rank") || !is_number("step") || !json.contains("kind") ||
        !json["kind"].is_string() || json["rank"] != groups.world().rank()) {
      continue;
    }
    ended_before_.emplace(json["step"].get<int64_t>(), json["kind"].get<std::string>());
  }
}

FaultInjector::~FaultInjector() {
  cancel_kills();
  slow_down({});
  slow_link(-1, 1);
  recorder().shift_clock({}, 0);
}

void FaultInjector::before_passes(int64_t step, StepExecutor& executor) {
  take_back_kills();
  const std::vector<Fault> faults = plan_.at(step);
  if (std::ranges::any_of(faults, [](const Fault& f) { return is_flip_of_state(f.kind); })) {
    executor.await_weights();
  }
  for (const Fault& fault : faults) {
    if (fault.rank != groups_.world().rank()) continue;
    if (was_before(fault)) continue;
    if (is_flip_of_state(fault.kind)) {
      flip(fault);
    } else if (fault.kind == FaultKind::kill && (fault.phase || !fault.span.empty())) {
      record(fault,
             fmt::format(R"({{"phase":"{}","span":{}}})", fault.phase ? name_of(*fault.phase) : "",
                         dump_json(nlohmann::json(fault.span))));
      kill_after_span(fault.phase, fault.span);
      at_span_.push_back(fault);
    } else if (fault.kind == FaultKind::kill || fault.kind == FaultKind::hang) {
      record(fault, "{}");
      ::kill(::getpid(), fault.kind == FaultKind::kill ? SIGKILL : SIGSTOP);
    } else if (fault.kind == FaultKind::flip_message) {
      const auto words = philox(plan_.seed(), uint64_t(fault.step), fault.number);
      record(fault, "{}");
      flip_bit_of_next_message(fault.bit >= 0 ? uint32_t(fault.bit) : words[0], kDataBytes);
    } else if (fault.kind == FaultKind::pause) {
      record(fault, "{}");
      std::this_thread::sleep_for(
          std::chrono::duration<double>(fault.seconds < 0 ? 0.1 : fault.seconds));
    } else if (fault.kind == FaultKind::no_space || fault.kind == FaultKind::io_error) {
      record(fault, "{}");
      fail_next_write(fault.kind == FaultKind::no_space ? ENOSPC : EIO, fault.file);
    } else if (fault.kind == FaultKind::late_message) {
      if (fragment_due(sync_, fault.step)) record(fault, "{}");
    } else if (fault.kind == FaultKind::slow) {
      slow(fault);
    } else if (fault.kind == FaultKind::slow_link) {
      slow_down_link(fault);
    } else if (fault.kind == FaultKind::clock) {
      shift_clock(fault);
    }
  }
}

bool FaultInjector::was_before(const Fault& fault) const {
  return may_end_run(fault.kind) &&
         ended_before_.contains({fault.step, std::string(name_of(fault.kind))});
}

void FaultInjector::slow(const Fault& fault) {
  PhaseTimes shares{};
  std::string phase = "passes";
  if (fault.phase) {
    shares[size_t(*fault.phase)] = fault.percent / 100;
    phase = name_of(*fault.phase);
  } else {
    for (const Phase pass : {Phase::forward, Phase::backward, Phase::weight_gradients}) {
      shares[size_t(pass)] = fault.percent / 100;
    }
  }
  record(fault, fmt::format(R"({{"percent":{},"phase":"{}"}})", fault.percent, phase));
  slow_down(shares);
}

void FaultInjector::slow_down_link(const Fault& fault) {
  const int peer = fault.peer >= 0 ? fault.peer : (fault.rank + 1) % groups_.world().size();
  record(fault, fmt::format(R"({{"percent":{},"peer":{}}})", fault.percent, peer));
  slow_link(peer, 1 + fault.percent / 100);
}

void FaultInjector::shift_clock(const Fault& fault) {
  const double seconds = fault.seconds == -1 ? 0 : fault.seconds;
  record(fault, fmt::format(R"({{"seconds":{},"ppm":{}}})", seconds, fault.ppm));
  recorder().shift_clock(std::chrono::nanoseconds(std::llround(seconds * 1e9)), fault.ppm);
}

void FaultInjector::after_passes(int64_t step) {
  for (const Fault& fault : plan_.at(step)) {
    const bool is_here = fault.rank == groups_.world().rank();
    if (fault.kind == FaultKind::flip_gradients && is_here && !was_before(fault)) flip(fault);
    if (fault.kind == FaultKind::flip_checkpoint) of_files_.push_back(fault);
  }
}

void FaultInjector::take_back_kills() {
  cancel_kills();
  for (const Fault& fault : at_span_) {
    missed_.push_back(fmt::format(
        "kill in step {} of rank {}: no span{}{} has ended since: expected one", fault.step,
        fault.rank, fault.span.empty() ? "" : fmt::format(" \"{}\"", printable(fault.span)),
        fault.phase ? fmt::format(" in phase {}", name_of(*fault.phase)) : ""));
  }
  at_span_.clear();
}

std::string FaultInjector::missed_kills() {
  take_back_kills();
  return missed_.empty() ? "" : fmt::format("--inject: {}", fmt::join(missed_, "; "));
}

void FaultInjector::after_save(int64_t saved_step) {
  std::erase_if(of_files_, [&](const Fault& fault) {
    if (fault.step > saved_step) return false;
    if (groups_.world().rank() == 0) flip_file(fault, checkpoint_path(out_, saved_step));
    return true;
  });
}

/// All that match the fault.
std::vector<FaultInjector::Spot> FaultInjector::spots(const Fault& fault, uint64_t draw) const {
  std::vector<Spot> found;
  for (const ModelChunk& chunk : ranks_.chunks) {
    const std::vector<Parameter>& list = chunk.stage.parameter_list();
    const ParameterSlices tensors(list);
    const auto add = [&](const StateSlice& slice) {
      tensors.for_each({slice.begin, slice.values.elements()}, [&](const ParameterSlice& range) {
        const Parameter& parameter = list[range.parameter];
        if (!fault.tensor.empty() &&
            ::fnmatch(fault.tensor.c_str(), parameter.name.c_str(), 0) != 0) {
          return;
        }
        found.push_back({parameter, slice.values.narrow(0, range.flat - slice.begin, range.count)});
      });
    };
    const auto add_all = [&](const std::vector<StateSlice>& slices) {
      for (const StateSlice& slice : slices) add(slice);
    };
    if (fault.kind == FaultKind::flip_masters) {
      const bool apart = chunk.optimizer.has_masters();
      add_all(chunk.optimizer.slices(apart ? Moment::master : Moment::weights));
    } else if (fault.kind == FaultKind::flip_moments) {
      std::vector<Moment> moments{Moment::first, Moment::second};
      for (const Moment outer : {Moment::anchor, Moment::outer_momentum}) {
        if (!chunk.optimizer.slices(outer).empty()) moments.push_back(outer);
      }
      add_all(chunk.optimizer.slices(moments[draw % moments.size()]));
    } else if (fault.kind == FaultKind::flip_gradients) {
      add_all(chunk.optimizer.reduced_gradients());
    } else {
      for (const Parameter& parameter : list) {
        tensors.for_each(local_range(parameter), [&](const ParameterSlice& range) {
          if (&list[range.parameter] != &parameter) return;
          add({range.flat,
               weights_as_read(chunk, parameter.sharding.over_tp(), range.flat, range.count)});
        });
      }
    }
  }
  return found;
}

/// Flips a bit of a random element.
void FaultInjector::flip(const Fault& fault) {
  const auto words = philox(plan_.seed(), uint64_t(fault.step), fault.number);
  const std::vector<Spot> all = spots(fault, words[3]);
  int64_t elements = 0;
  for (const Spot& spot : all) elements += spot.values.elements();
  if (elements == 0) return record(fault, R"({"skipped":"no such tensor on this rank"})");
  int64_t element = int64_t((uint64_t(words[0]) << 32 | words[1]) % uint64_t(elements));
  auto spot = all.begin();
  for (; element >= spot->values.elements(); ++spot) element -= spot->values.elements();
  const size_t bytes = size_of(spot->values.dtype());
  auto* const data = static_cast<std::byte*>(spot->values.data()) + size_t(element) * bytes;
  const unsigned bit = (fault.bit >= 0 ? unsigned(fault.bit) : words[2]) % unsigned(8 * bytes);
  uint32_t value = 0;
  std::memcpy(&value, data, bytes);
  const uint32_t flipped = value ^ (uint32_t{1} << bit);
  record(fault, fmt::format(R"({{"tensor":"{}","bit":{},"before":"{:#x}","after":"{:#x}"}})",
                            spot->parameter.name, bit, value, flipped));
  std::memcpy(data, &flipped, bytes);
}

/// Flips a bit of a random byte of a checkpoint's tensors.
void FaultInjector::flip_file(const Fault& fault, const std::string& checkpoint) {
  const auto words = philox(plan_.seed(), uint64_t(fault.step), fault.number);
  std::vector<std::string> files = names_in(checkpoint);
  std::erase_if(files, [](const std::string& name) { return !name.ends_with(".safetensors"); });
  if (files.empty()) return record(fault, R"({"skipped":"no checkpoint"})");
  const std::string path = checkpoint + "/" + files[words[0] % files.size()];
  const FileDescriptor file(path, O_RDWR | O_NOFOLLOW);
  const uint64_t offset =
      (uint64_t(words[1]) << 32 | words[2]) % std::max<uint64_t>(1, file_size(file.get(), path));
  const unsigned bit = (fault.bit >= 0 ? unsigned(fault.bit) : words[3]) % 8;
  record(fault, fmt::format(R"({{"file":{},"byte":{},"bit":{}}})", dump_json(nlohmann::json(path)),
                            offset, bit));
  uint8_t value = 0;
  read_at(file.get(), path, &value, 1, offset);
  value = uint8_t(value ^ 1u << bit);
  write_at(file.get(), path, &value, 1, offset);
}

/// `details`: a JSON object. Several processes append to the file.
void FaultInjector::record(const Fault& fault, const std::string& details) {
  nlohmann::ordered_json json{
      {"step", fault.step},
      {"rank", fault.rank},
      {"kind", name_of(fault.kind)},
      {"time_s",
       std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count()}};
  json.update(nlohmann::ordered_json::parse(details));
  const std::string path = out_ + "/injected.jsonl";
  const FileDescriptor file(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW);
  std::string line = dump_json(json) + "\n";
  append_to(file.get(), path, line);
}

}  // namespace tandem
