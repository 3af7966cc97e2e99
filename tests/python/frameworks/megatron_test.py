"""tandem.megatron against Megatron-Core's own layers, on CPU ranks."""
import contextlib
import os
import types
import unittest
import unittest.mock

import group

group.require("megatron")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer import transformer_block

import tandem
import tandem.megatron
import tandem.torch
from tandem.torch import _receipts

SEQUENCE, BATCH, HIDDEN, FFN = 24, 2, 32, 48
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # relative to the largest value


def _add_wgrad(total_input, grad_output, main_grad):
    main_grad += grad_output.t().to(main_grad.dtype) @ total_input.to(main_grad.dtype)


def run_megatron_without_gpus():
    """Lets Megatron-Core's linears, which ask for the current GPU and for Apex's kernels, run on the
    CPU."""
    torch.cuda.current_device = lambda: "cpu"
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # of dropout, which is off
    backends.LNImpl = gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = Norm
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=_add_wgrad,
                                                                  wgrad_gemm_accum_fp16=_add_wgrad)


def config(**options):
    size = dist.get_world_size()
    return ModelParallelConfig(**{"tensor_model_parallel_size": size, "sequence_parallel": size > 1,
                                  "use_cpu_initialization": True, "params_dtype": torch.float32,
                                  "gradient_accumulation_fusion": False, **options})


def values(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def column(kind, of, **options):
    return kind(HIDDEN, FFN * dist.get_world_size(), config=of, init_method=torch.nn.init.xavier_normal_,
                **{"bias": True, "skip_bias_add": False, **options})


def row(kind, of, **options):
    return kind(FFN * dist.get_world_size(), HIDDEN, config=of, init_method=torch.nn.init.xavier_normal_,
                **{"bias": True, "skip_bias_add": False, "input_is_parallel": True, **options})


def receipts(op):
    return [row for row in tandem.torch.report() if row["op"] == op]


class Layers(unittest.TestCase):
    def setUp(self):
        _receipts.clear()
        tandem.torch._fused.clear_plans()

    def same(self, got, expected, dtype=torch.float32):
        self.assertEqual(got.dtype, expected.dtype)
        self.assertEqual(got.shape, expected.shape)
        scale = max(1.0, float(expected.abs().max()))
        self.assertLessEqual(float((got.float() - expected.float()).abs().max()), BOUND[dtype] * scale)

    def passes(self, layer, x, dy, main_grad=None):
        """Output, gradients of x, weight and bias, and main_grad of a layer's two microbatches."""
        if main_grad is not None:
            layer.weight.main_grad = torch.full_like(layer.weight, 0.5, dtype=main_grad)
            layer.weight.grad_added_to_main_grad = False
        results = []
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y, _ = layer(leaf)
            y.backward(dy)
            results += [y.detach(), leaf.grad]
        results.append(layer.bias.grad)
        if main_grad is None:
            return [*results, layer.weight.grad]
        self.assertTrue(layer.weight.grad_added_to_main_grad)
        return [*results, layer.weight.main_grad]

    def compare(self, make, ours, stock, x, dy, op, dtype=torch.float32, main_grad=None, **options):
        of = config(params_dtype=dtype, gradient_accumulation_fusion=main_grad is not None, **options)
        torch.manual_seed(3)
        reference = make(stock, of)
        layer = make(ours, of)
        with torch.no_grad():
            layer.weight.copy_(reference.weight)
            for each in (layer, reference):
                each.bias.copy_(values(*each.bias.shape, seed=5))
        expected = self.passes(reference, x.to(dtype), dy.to(dtype), main_grad)
        self.assertEqual(receipts(op), [], "Megatron-Core's own layer runs none of tandem's products")
        for got, want in zip(self.passes(layer, x.to(dtype), dy.to(dtype), main_grad), expected, strict=True):
            self.same(got, want, dtype)
        for name in (op, f"{op} dgrad", f"{op} wgrad"):
            rows = receipts(name)
            self.assertEqual([each["calls"] for each in rows], [2], name)
            self.assertIn(rows[0]["ran"], ("overlapped", "serial"), name)

    def shapes(self, rows_in, rows_out):
        size, rank = dist.get_world_size(), dist.get_rank()
        whole = {"shard": SEQUENCE // size, "all": SEQUENCE}
        return whole[rows_in], whole[rows_out], rank

    def column_case(self, **options):
        rows_in, rows_out, rank = self.shapes("shard", "all")
        self.compare(column, tandem.megatron.ColumnParallelLinear, layers.ColumnParallelLinear,
                     values(rows_in, BATCH, HIDDEN, seed=10 + rank), values(rows_out, BATCH, FFN, seed=20 + rank),
                     tandem.megatron.COLUMN, **options)

    def row_case(self, **options):
        rows_in, rows_out, rank = self.shapes("all", "shard")
        self.compare(row, tandem.megatron.RowParallelLinear, layers.RowParallelLinear,
                     values(rows_in, BATCH, FFN, seed=30 + rank), values(rows_out, BATCH, HIDDEN, seed=40 + rank),
                     tandem.megatron.ROW, **options)

    def test_column_matches(self):
        self.column_case()

    def test_row_matches(self):
        self.row_case()

    def test_bfloat16_matches(self):
        self.column_case(dtype=torch.bfloat16)
        self.row_case(dtype=torch.bfloat16)

    def test_main_grad_is_accumulated(self):
        for dtype, main_grad in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                 (torch.bfloat16, torch.bfloat16)):
            with self.subTest(dtype=dtype, main_grad=main_grad):
                self.setUp()
                self.column_case(dtype=dtype, main_grad=main_grad)
                self.row_case(dtype=dtype, main_grad=main_grad)

    def test_frozen_weights_match(self):
        """As adapters train: only x has a gradient, and x is not saved."""
        rows, _, rank = self.shapes("shard", "all")
        for make, ours, stock, x in (
                (column, tandem.megatron.ColumnParallelLinear, layers.ColumnParallelLinear,
                 values(rows, BATCH, HIDDEN, seed=10 + rank)),
                (row, tandem.megatron.RowParallelLinear, layers.RowParallelLinear,
                 values(SEQUENCE, BATCH, FFN, seed=30 + rank))):
            reference, layer = make(stock, config()), make(ours, config())
            results = []
            for each in (reference, layer):
                with torch.no_grad():
                    each.weight.copy_(reference.weight)
                each.weight.requires_grad_(False)
                leaf = x.clone().requires_grad_()
                y, _ = each(leaf)
                y.backward(values(*y.shape, seed=50 + rank))
                self.assertIsNone(each.weight.grad)
                results.append((y.detach(), leaf.grad))
            for expected, got in zip(*results, strict=True):
                self.same(got, expected)
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
                layer(x.clone().requires_grad_())
            self.assertNotIn(tuple(x.shape), saved)
        self.assertEqual({row["ran"] for row in tandem.torch.report()} & {"torch"}, set())

    def test_control_a_wrong_weight_gradient_is_noticed(self):
        gradient = tandem.megatron._linears.weight_gradient
        tandem.megatron._linears.weight_gradient = lambda *given, **more: gradient(*given, **more) * 1.001
        try:
            with self.assertRaises(AssertionError):
                self.column_case()
        finally:
            tandem.megatron._linears.weight_gradient = gradient

    def stock(self, layer, x, why, op=tandem.megatron.COLUMN, **call):
        _receipts.clear()
        layer(x, **call)
        rows = receipts(op)
        self.assertEqual([(each["ran"], each["why"], each["calls"]) for each in rows], [("torch", why, 1)])
        with unittest.mock.patch.dict(os.environ, TANDEM_STRICT="1"):
            with self.assertRaisesRegex(tandem.Unsupported, f"would run as torch: {why}"):
                layer(x, **call)

    def test_other_calls_are_megatrons_and_reported(self):
        kinds = tandem.megatron
        x = values(SEQUENCE, BATCH, HIDDEN, seed=1)
        self.stock(column(kinds.ColumnParallelLinear, config(sequence_parallel=False)), x, "sequence_parallel is off")
        self.stock(row(kinds.RowParallelLinear, config(sequence_parallel=False)),
                   values(SEQUENCE, BATCH, FFN, seed=1), "sequence_parallel is off", tandem.megatron.ROW)
        layer = column(kinds.ColumnParallelLinear, config())
        self.stock(layer, x, "the weight is given at the call", weight=layer.weight.detach().clone().requires_grad_())
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        one = config(tensor_model_parallel_size=1, sequence_parallel=False)
        layer = tandem.megatron.ColumnParallelLinear(HIDDEN, FFN, config=one, bias=True,
                                                     init_method=torch.nn.init.zeros_, tp_group=alone)
        self.stock(layer, x, "a group of 1 rank has nothing to overlap")
        layer.tp_group = None
        self.stock(layer, x, "a group of 1 rank has nothing to overlap")
        layer = column(kinds.ColumnParallelLinear, config(params_dtype=torch.float64))
        self.stock(layer, x.double(), "x is torch.float64")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer = column(kinds.ColumnParallelLinear, config())
            self.stock(layer, x, "torch.autocast is on")

    def test_layers_keep_megatrons_state(self):
        torch.manual_seed(7)
        stock = column(layers.ColumnParallelLinear, config())
        torch.manual_seed(7)
        ours = column(tandem.megatron.ColumnParallelLinear, config())
        self.assertEqual(list(stock.state_dict()), list(ours.state_dict()))
        self.assertTrue(torch.equal(stock.weight, ours.weight))
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        shards = [each.sharded_state_dict("layer.", metadata=metadata)["layer.weight"] for each in (stock, ours)]
        self.assertEqual(shards[0].global_offset, shards[1].global_offset)
        self.assertEqual(shards[0].global_shape, shards[1].global_shape)


class Norm(torch.nn.LayerNorm):
    """LayerNorm of this rank's rows, where Megatron-Core uses Apex's."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True


class Models(unittest.TestCase):
    """A GPT of two layers, whose spec Megatron-Core makes."""

    def model(self, seed):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        size = dist.get_world_size()
        torch.manual_seed(seed)
        of = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
                               tensor_model_parallel_size=size, sequence_parallel=True, hidden_dropout=0.0,
                               attention_dropout=0.0, bias_dropout_fusion=False, bias_activation_fusion=False,
                               masked_softmax_fusion=False, gradient_accumulation_fusion=False)
        return GPTModel(config=of, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64,
                        max_sequence_length=16, position_embedding_type="rope")

    def passes(self, model):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(16).expand(2, 16)
        mask = torch.ones(1, 1, 16, 16).triu(1).bool()
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        return float(loss.detach()), {name: each.grad for name, each in model.named_parameters()}

    def test_enable_replaces_every_provider_of_local_specs(self):
        from megatron.core.models.gpt import moe_module_specs
        from megatron.core.transformer import multi_token_prediction

        modules = gpt_layer_specs, moe_module_specs, multi_token_prediction
        tandem.megatron.enable()
        tandem.megatron.enable()
        for module in modules:
            self.assertIs(module.LocalSpecProvider, tandem.megatron.TandemSpecProvider)
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        self.assertIs(spec.submodules.self_attention.submodules.linear_qkv, tandem.megatron.ColumnParallelLinear)
        tandem.megatron.disable()
        for module in modules:
            self.assertIs(module.LocalSpecProvider, backends.LocalSpecProvider)

    def test_gpt_matches(self):
        stock = self.model(11)
        expected, gradients = self.passes(stock)
        _receipts.clear()
        tandem.megatron.enable()
        try:
            model = self.model(11)
        finally:
            tandem.megatron.disable()
        model.load_state_dict(stock.state_dict())
        loss, got = self.passes(model)
        self.assertAlmostEqual(loss, expected, delta=2e-6)
        self.assertEqual(list(got), list(gradients))
        for name, gradient in got.items():
            scale = max(1e-3, float(gradients[name].abs().max()))
            self.assertLessEqual(float((gradient - gradients[name]).abs().max()), 1e-5 * scale, name)
        # Per layer linear_qkv and linear_fc1 are column-parallel, linear_proj and linear_fc2 row-parallel.
        for op in (tandem.megatron.COLUMN, tandem.megatron.ROW):
            self.assertEqual(sum(row["calls"] for row in receipts(op) if row["ran"] != "torch"), 4, op)


def setUpModule():
    run_megatron_without_gpus()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


if __name__ == "__main__":
    group.run_tests()
