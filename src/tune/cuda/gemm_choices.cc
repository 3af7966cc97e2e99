#include "tune/cuda/gemm_choices.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tune/gemm_choices.h"
#include "tune/tuner_file.h"

namespace tandem::gpu {
namespace {

using Json = nlohmann::json;

struct GemmAgreement {
  size_t exchanged = 0;  // number of this process's timed choices already exchanged
};

GemmChoices choices_in_file() {
  GemmChoices choices;
  const std::string prefix = gemm_choice_prefix();
  const Json entries = read_tuner_file(tuner_file_path());
  for (const auto& [key, entry] : entries.items()) {
    if (!key.starts_with(prefix) || !entry.contains("choice")) continue;
    if (const auto choice = gemm_choice_in(entry["choice"].get<std::string>())) {
      choices.emplace(key, *choice);
    }
  }
  return choices;
}

void keep_in_file(const GemmChoices& choices) {
  Json entries = Json::object();
  for (const auto& [key, choice] : choices) entries[key] = {{"choice", text_of(choice)}};
  keep_in_tuner_file(tuner_file_path(), entries);
}

std::vector<GemmChoices> choices_of_ranks(GpuCommunicator& comm, const GemmChoices& local) {
  const std::string text = text_of(local);
  std::vector<GemmChoices> by_rank;
  for (const auto& blob :
       comm.exchange(std::as_bytes(std::span(text.data(), text.size())), "gemm algorithms")) {
    by_rank.push_back(gemm_choices_in({reinterpret_cast<const char*>(blob.data()), blob.size()}));
  }
  return by_rank;
}

}  // namespace

void share_gemm_choices(GpuCommunicator& comm) {
  comm.attached<GemmAgreement>([&] {
    keep_gemm_choices(
        choices_of_ranks(comm, comm.rank() == 0 ? choices_in_file() : GemmChoices())[0]);
    return new GemmAgreement;
  });
}

void agree_on_gemm_choices(GpuCommunicator& comm, const LtContext& context) {
  auto& agreement = comm.attached<GemmAgreement>([] { return new GemmAgreement; });
  const TimedChoices local = timed_gemm_choices(agreement.exchanged);
  const GemmChoices agreed = agreed_choices(choices_of_ranks(comm, local.choices));
  agreement.exchanged = local.end;
  if (agreed.empty()) return;
  adopt_gemm_choices(context, agreed);
  if (comm.rank() == 0) keep_in_file(agreed);
}

}  // namespace tandem::gpu

namespace tandem {

void share_gemm_choices(Communicator& ranks) {
  if (ranks.on_gpu()) gpu::share_gemm_choices(gpu::as_gpu(ranks));
}

void agree_on_gemm_choices(Communicator& ranks) {
  if (ranks.on_gpu()) gpu::agree_on_gemm_choices(gpu::as_gpu(ranks), gpu::LtContext());
}

}  // namespace tandem
