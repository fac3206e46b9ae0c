"""Sharding tools and the ordered sum on one rank and on the ranks of others, without talking."""

import unittest

import numpy
import torch

import cpattn

CU_SEQLENS = (0, 40, 41, 41, 100)


def deal(**keywords):
    return cpattn.Sharding(
        cu_seqlens=CU_SEQLENS, group=cpattn.self_group(), chunk_tokens=8, **keywords
    )


class Rows(unittest.TestCase):
    def test_one_rank_has_everything_in_order(self):
        one = deal()
        numpy.testing.assert_array_equal(one.index(), numpy.arange(100))
        numpy.testing.assert_array_equal(one.local_cu_seqlens(), CU_SEQLENS)
        positions = numpy.concatenate([numpy.arange(40), [0], numpy.arange(59)])
        numpy.testing.assert_array_equal(one.positions(), positions)

    def test_shard_and_unshard_any_type(self):
        for x in (
            numpy.arange(300.0).reshape(100, 3),
            numpy.arange(100, dtype="int16"),
            numpy.asfortranarray(numpy.arange(600.0).reshape(100, 2, 3)),
            torch.arange(100.0),
            torch.arange(200).reshape(100, 2).bfloat16(),
            torch.arange(100) % 2 == 0,
        ):
            one = deal()
            back = one.unshard(one.shard(x))
            self.assertIs(type(back), type(x))
            self.assertEqual(back.dtype, x.dtype)
            self.assertTrue(bool((back == x).all()))

    def test_keys_of_their_own_lengths(self):
        both = cpattn.Sharding(
            cu_seqlens=(0, 4, 10), cu_seqlens_kv=(0, 6, 20), group=cpattn.self_group()
        )
        self.assertEqual(len(both.index()), 10)
        self.assertEqual(len(both.index(of_keys=True)), 20)
        numpy.testing.assert_array_equal(both.local_cu_seqlens(of_keys=True), (0, 6, 20))
        self.assertEqual(both.shard(numpy.arange(20), of_keys=True).tolist(), list(range(20)))

    def test_it_is_the_plans_deal(self):
        plan = cpattn.Attention(cpattn.self_group(), chunk_tokens=8).plan(
            cu_seqlens=CU_SEQLENS, num_heads=1, head_dim=8
        )
        numpy.testing.assert_array_equal(plan.q_index, deal().index())
        numpy.testing.assert_array_equal(plan.kv_index, deal().index(of_keys=True))

    def test_targets_stay_in_their_document(self):
        tokens = numpy.random.default_rng(3).integers(0, 256, 100)
        expected = numpy.append(tokens[1:], 0)
        expected[[39, 40, 99]] = cpattn.IGNORE_TARGET
        numpy.testing.assert_array_equal(deal().next_token_targets(tokens), expected)
        self.assertEqual(deal().next_token_targets(torch.from_numpy(tokens), ignore=-1)[99], -1)

    def test_refusals(self):
        for pattern, call in (
            ("x: 99 rows, expected 100", lambda: deal().shard(numpy.zeros(99))),
            ("x: 99 rows, expected 100", lambda: deal().unshard(numpy.zeros(99))),
            ("rank: 1, expected 0 to 0", lambda: deal().index(rank=1)),
            ("sharding: 'striped', expected contiguous", lambda: deal(sharding="striped")),
            (
                "tokens: .* of float64, expected integers",
                lambda: deal().next_token_targets(numpy.zeros(100)),
            ),
            ("chunk_tokens 0", lambda: cpattn.Sharding(seq_len=4, chunk_tokens=0)),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(cpattn.InvalidArgumentError, pattern):
                    call()


class Sums(unittest.TestCase):
    def test_leaves_cover_the_rows(self):
        leaves = deal().leaves()
        self.assertEqual([leaf.leaf for leaf in leaves], list(range(deal().num_leaves)))
        self.assertEqual([leaf.begin for leaf in leaves], [0] + [leaf.end for leaf in leaves[:-1]])
        self.assertEqual(leaves[-1].end, 100)

    def test_order_is_the_tree_whoever_comes_first(self):
        """Seven leaves: ((0 1) (2 3)) ((4 5) 6), in the leaves' own type."""
        random = numpy.random.default_rng(4)
        for dtype in ("float32", "float64"):
            x = random.standard_normal((7, 5, 3)).astype(dtype)
            tree = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + x[6])
            for order in (range(7), random.permutation(7)):
                rows = list(order)
                total = cpattn.ordered_sum(x[rows], rows, 7, group=cpattn.self_group())
                self.assertEqual(total.dtype, dtype)
                numpy.testing.assert_array_equal(total, tree)
            total = cpattn.ordered_sum(torch.from_numpy(x), range(7), 7, group=cpattn.self_group())
            numpy.testing.assert_array_equal(total.numpy(), tree)

    def test_numbers(self):
        total = cpattn.ordered_sum(numpy.arange(4.0), range(4), 4, group=cpattn.self_group())
        self.assertEqual(float(total), 6.0)

    def test_one_leaf_after_the_other(self):
        total = cpattn.OrderedSum(3, 2, group=cpattn.self_group())
        out = numpy.empty(2, "float32")
        for _ in range(2):  # it starts afresh
            for leaf in (2, 0, 1):
                total.add(leaf, numpy.array([leaf, 1], "float32"))
            self.assertIs(total.all_reduce(out), out)
            self.assertEqual(out.tolist(), [3, 3])

    def test_refusals(self):
        group = cpattn.self_group()

        def one_leaf(values):
            total = cpattn.OrderedSum(1, 2)
            total.add(0, values)  # says nothing: the sum does
            total.all_reduce()

        for pattern, call in (
            ("leaf 3", lambda: cpattn.ordered_sum(numpy.zeros((1, 2)), [3], 3, group=group)),
            ("leaf 1", lambda: cpattn.ordered_sum(numpy.zeros((2, 2)), [1, 1], 3, group=group)),
            (
                "leaves: 2 numbers, expected 1",
                lambda: cpattn.ordered_sum(numpy.zeros((1, 2)), [0, 1], 3),
            ),
            ("dtype: float16, expected float32", lambda: cpattn.OrderedSum(1, 1, dtype="float16")),
            ("dtype: int64", lambda: cpattn.OrderedSum(1, 1, dtype="int64")),
            ("values: 3 numbers, expected 2", lambda: one_leaf(numpy.zeros(3, "float32"))),
            ("values: dtype float64, expected float32", lambda: one_leaf(numpy.zeros(2))),
        ):
            with self.subTest(pattern):
                with self.assertRaisesRegex(cpattn.InvalidArgumentError, pattern):
                    call()


if __name__ == "__main__":
    unittest.main()
