#include <memory>

#include "cli/commands.h"
#include "cli/train_run.h"

namespace tandem::cli {
namespace {

constexpr double kMaxEpochs = 1000;

constexpr const char* kFinetuneFooter = R"(
Data are chats, a JSON object in each line (messages, conversations, or instruction and output), for
which the model's folder needs a chat template, or text (JSON Lines, files, folders, globs). Loss of
chats is taken on answers only.

Chosen, unless --set says more: 5 % of the data are held out (--val FILE: other data), their loss is
taken twice an epoch, the run ends early after three that are not below the lowest one, and final/
has the weights of the lowest. Chats fit a sequence whole; a step has at most 16384 tokens, or a
sequence for each data parallel rank. The learning rate is 2e-5 for 1e9 parameters, grows with
1 / sqrt(parameters) for fewer, and falls to a tenth. OUT has all of it as config.toml, a job file
for tandem train. Ctrl-C ends the run with a checkpoint, from which --resume continues, with the
same model and data; it starts a new run where there is none.

Examples:
  tandem finetune MODEL_DIR --data chats.jsonl --out out/tuned
  tandem finetune MODEL_DIR --data chats.jsonl --val other.jsonl --epochs 1 --tp 2 --out out/tuned
  tandem finetune MODEL_DIR --data notes/ --out out/tuned --set optimizer.lr=1e-5 train.seq=512
  tandem serve out/tuned   # a page to chat, at http://127.0.0.1:8000/)";

}  // namespace

void add_finetune(CLI::App& app) {
  auto* command = app.add_subcommand("finetune", "Fine-tune a model on chats or text");
  auto arguments = std::make_shared<TrainArguments>();
  FinetuneRequest& request = arguments->finetune.emplace();
  command->option_defaults()->group("Model and data");
  command
      ->add_option("model", request.model,
                   "Folder of the model: a Hugging Face folder, or one that tandem train wrote")
      ->required();
  command->add_option("--data", request.data, "Files, folders or globs of chats or text")
      ->required()
      ->allow_extra_args();
  command->add_option("--val", request.validation,
                      "Data to take the held-out loss on, in place of 5 % of --data");
  command->add_option("--out", arguments->out, "Folder for metrics, checkpoints and the model")
      ->required();
  command->add_option("--epochs", request.epochs, "Passes over the data, at most (default: 3)")
      ->check(CLI::Range(1e-3, kMaxEpochs));
  command
      ->add_option("--set", arguments->overrides,
                   "Set keys of the job (table.key=value), over what is chosen")
      ->allow_extra_args(false)
      ->take_all();
  command->add_flag("--resume", arguments->resume,
                    "Continue from the newest valid checkpoint in --out");
  add_layout_options(*command, *arguments);
  command->option_defaults()->group("Watching");
  command->add_option(
      "--live", arguments->live,
      "Serve a page of the run while it trains (tandem report OUT --live does so later)");
  command->footer(kFinetuneFooter);
  command->callback([arguments] { run_training(*arguments); });
}

}  // namespace tandem::cli
