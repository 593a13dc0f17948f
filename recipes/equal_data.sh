#!/usr/bin/env bash
# Trains ten drafters for smollm2-135m on the same text, races them and joins the table of docs/training.md.
#
#   recipes/equal_data.sh FOLDER
#
# Then it trains the two best with two more seeds, and races these runs alone. The text is that of the shipped corpus;
# every drafter sees 180,000 tokens of it once. This takes about 100 minutes of two cores. The script has not been run as
# a whole: its commands were, two trainings at a time, each with OMP_NUM_THREADS=1.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && cd "$1"
python "$here/recipes/prompts.py" 7000 prompts_11.jsonl 11
python "$here/recipes/prompts.py" 6000 prompts_3.jsonl 3
python "$here/recipes/corpus_dialogues.py" "$here/specengine/checkpoints/smollm2-135m/suffix/corpus.safetensors" \
  corpus_data prompts_11.jsonl prompts_3.jsonl

race=none
learn() { # NAME SPEC CHAIN [OPTIONS]: what is trained, the option that makes its tree a chain, and how
  python -m specengine.cli.main train --target smollm2-135m --drafter "$2" --out "$1" --data corpus_data --tokens 180000 \
    --batch-tokens 512 --rows 1024 --evaluate-steps 2000 --held-out 32 --learning-rate 1e-3 --precision bfloat16 \
    --storage int8 "${@:4}"
  local drafter=${2%%,*}:$1
  race=$race,$drafter,$3,adaptive=false,$drafter,adaptive=false
}
echo '[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]' > chain.json
learn eagle3 eagle3,levels=7,start=layer top_k=1
learn fasteagle fasteagle,levels=4 top_k=1
learn fasteagle-head fasteagle,levels=4,entry=concat,head=own,markov=64 top_k=1
learn medusa medusa,heads=4 tree=chain.json
learn dflash dflash,block=8 tree=chain
learn dflash-2 dflash,block=8,layers=2 tree=chain
learn dspark dspark,block=7,markov=64 tree=chain
learn dspark-2 dspark,block=7,markov=64,layers=2 tree=chain
learn jetspec jetspec,block=8 tree=chain
learn jetspec-2 jetspec,block=8,layers=2 tree=chain

race_them() { # NAME: of the results
  python -m specengine.bench --drafters "$race" --limit 2 --max-new-tokens 48 --json "$1.json"
  PYTHONPATH=$here python "$here/bench/equal_data.py" "$1.json" "$here/bench/results/smollm2-135m-$1.json"
}
race_them equal-data

race=none,eagle3:eagle3,top_k=1,adaptive=false,eagle3:eagle3,adaptive=false
race=$race,fasteagle:fasteagle-head,top_k=1,adaptive=false,fasteagle:fasteagle-head,adaptive=false
for seed in 1 2; do
  learn "eagle3-s$seed" eagle3,levels=7,start=layer top_k=1 --seed "$seed" --data-seed 0
  learn "fasteagle-head-s$seed" fasteagle,levels=4,entry=concat,head=own,markov=64 top_k=1 --seed "$seed" --data-seed 0
done
race_them equal-data-seeds
